"""The settings of a TRL run: our own, those of TRL's `GRPOConfig`, and the unsupported fields of `GRPOConfig`.

Nothing here loads torch or trl before a `GRPOConfig` is created.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from agentlightning.errors import BadRequestError, closest_name
from agentlightning.training.external import installed_version
from agentlightning.training.settings import GRPOSettings

VERSIONS: Final = "trl>=1.16,<1.17"
"""Supported versions. `rollout_func` is experimental, and a later minor version may call it differently."""

OWN: Final = (
    *("eval_steps", "solved_above", "step_timeout_seconds", "rollout_timeout_seconds", "late_rollouts"),
    *("refused_calls", "engine_batch", "max_drift", "alarms", "resource_name", "progress", "save_steps"),
    *("save_total_limit", "output_dir", "curriculum"),
)
"""Settings shared with `agl.GRPO`, with the same meaning; the others are fields of `GRPOConfig`."""

_SAMPLING = "set top_p, top_k, min_p and repetition_penalty; agents pass other parameters with their calls"
_OUR_ENGINE = "our engine serves the trainer's own model; use agl.GRPO(use_vllm=True) to serve with vLLM"
_OUR_EVALUATION = "the run evaluates held-out tasks: pass val_dataset to fit, and set eval_steps= of agl.TRL"
_ONE_REWARD = "TRL receives one reward per rollout; use agl.GRPO(reward_weights=...) for several dimensions"
_OUR_CHECKPOINTS = "the run writes its own checkpoints, every save_steps= steps, and resumes from the newest one"
_REFUSED: Final[dict[str, tuple[object, str]]] = {
    "use_vllm": (False, _OUR_ENGINE),
    "use_transformers_continuous_batching": (False, _OUR_ENGINE),
    "use_transformers_paged": (None, _OUR_ENGINE),
    "generation_kwargs": (None, _SAMPLING),
    "chat_template_kwargs": (None, "the engine renders the agents' calls; agents pass these arguments with each call"),
    "max_tool_calling_iterations": (None, "the agent calls its own tools, without a limit"),
    "reward_weights": (None, _ONE_REWARD),
    "multi_objective_aggregation": ("sum_then_normalize", _ONE_REWARD),
    "eval_strategy": ("no", _OUR_EVALUATION),
    "eval_on_start": (False, _OUR_EVALUATION),
    "num_generations_eval": (None, _OUR_EVALUATION),
    "load_best_model_at_end": (False, _OUR_CHECKPOINTS),
    "save_only_model": (False, _OUR_CHECKPOINTS),
    "resume_from_checkpoint": (None, "start the run again with its run_id; it resumes from its newest checkpoint"),
    "push_to_hub": (False, "the run writes only into its folder; push the folder model/ after the run"),
    "auto_find_batch_size": (False, "the number of rollouts of a step must be known before they start"),
    "fsdp": (None, "the engine that serves the agent cannot read its sharded weights"),
}
"""Fields of `GRPOConfig` that must keep their default value, and the reason."""
_OTHER_NAMES: Final = {
    "batch_size": "per_device_train_batch_size, which counts rollouts: tasks times num_generations",
    "lora": "peft_config",
    "device": "use_cpu=True or False",
    "minibatch_rollouts": "steps_per_generation",
    "deterministic": "full_determinism",
}


@dataclass(frozen=True, kw_only=True)
class TRLSettings:
    """The settings of `agl.TRL`, checked as far as they can be without the tasks."""

    model: str
    config: Any
    """A `trl.GRPOConfig`."""
    peft_config: Any
    own: Mapping[str, Any]
    """The user's values of our settings, by name."""

    @property
    def rollouts(self) -> int:
        """Number of rollouts per step."""
        return int(self.config.generation_batch_size or 0)

    @property
    def updates(self) -> int:
        """Number of optimizer steps per step."""
        passes = int(self.config.steps_per_generation or 1) * self.config.num_iterations
        return passes // self.config.gradient_accumulation_steps

    @property
    def trains_without_reward(self) -> bool:
        """True if a row with an advantage of zero still changes the weights."""
        return bool(self.config.beta or self.config.entropy_coef or self.config.use_adaptive_entropy)

    def max_steps(self, tasks: int) -> int:
        """Return the number of steps for this number of tasks; each step collects rollouts once."""
        if self.config.max_steps > 0:
            return math.ceil(self.config.max_steps / self.updates)
        per_step = self.rollouts // int(self.config.num_generations or 1)
        return max(1, math.ceil(self.config.num_train_epochs * tasks / per_step))

    def as_grpo(self, tasks: int) -> GRPOSettings:
        """Return the settings for collecting, reading and recording rollouts."""
        config = self.config
        return GRPOSettings(
            model=self.model,
            max_steps=self.max_steps(tasks),
            batch_size=self.rollouts // int(config.num_generations or 1),
            num_generations=int(config.num_generations or 1),
            learning_rate=config.learning_rate,
            lr_scheduler_type="constant" if str(config.lr_scheduler_type) == "constant" else "linear",
            num_iterations=config.num_iterations,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=max(0, config.top_k or 0),
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
            max_completion_length=int(config.max_completion_length or 256),
            mask_truncated_completions=config.mask_truncated_completions,
            seed=config.seed,
            shuffle_dataset=bool(config.shuffle_dataset),
            deterministic=config.full_determinism,
            record_tokens="none",
            max_rows_per_rollout=None,  # a rollout with several rows ends the run
            **self.own,
        )

    def facts(self) -> dict[str, Any]:
        """Return the settings that affect the result of a step, as JSON data."""
        excluded = ("output_dir", "logging_", "report_to", "save_", "run_name", "hub_", "disable_tqdm", "max_steps")
        config = {name: value for name, value in self.config.to_dict().items() if not name.startswith(excluded)}
        adapter = None if self.peft_config is None else self.peft_config.to_dict()
        return _as_json({"config": config, "peft_config": adapter, "version": installed_version("trl", "TRL")})

    def recorded(self) -> dict[str, object]:
        return {"model": self.model, **_as_json(self.own), **self.facts()}


def make_settings(model: object, config: Any, peft_config: object, settings: Mapping[str, Any]) -> TRLSettings:
    """Return checked settings.

    Raises:
        ImportError: `trl` is not installed, or in an unsupported version.
        TypeError: a setting is unknown, `config` is not a `GRPOConfig`, or both a `config` and its fields are passed.
        BadRequestError: a setting is not supported here. The message names it and the fix.
    """
    if not isinstance(model, (str, Path)) or not str(model):
        raise BadRequestError(f"model must be the folder of a transformers model; got {model!r}")
    version = installed_version("trl", "TRL")
    if version.split(".")[:2] != ["1", "16"]:
        raise ImportError(f"agl.TRL requires {VERSIONS}; trl {version} is installed: pip install 'agl-framework[trl]'")
    import torch
    from trl import GRPOConfig  # pyright: ignore[reportAttributeAccessIssue] -- it takes the module beside this one

    own = {name: value for name, value in settings.items() if name in OWN}
    of_trl = {name: value for name, value in settings.items() if name not in OWN}
    _check_names(of_trl, [field.name for field in dataclasses.fields(GRPOConfig) if field.init])
    if config is None:
        on_cpu = bool(of_trl.get("use_cpu", not torch.cuda.is_available()))
        defaults = {"output_dir": "runs", "use_cpu": on_cpu, "bf16": not on_cpu and not of_trl.get("fp16", False)}
        defaults |= {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
        config = GRPOConfig(**{**defaults, **of_trl})
    elif not isinstance(config, GRPOConfig):
        raise TypeError(f"config must be a trl.GRPOConfig; got {type(config).__name__}")
    elif of_trl:
        raise TypeError(f"Set {', '.join(of_trl)} in config=GRPOConfig(...), or omit config")
    else:
        own.setdefault("save_steps", int(config.save_steps) if str(config.save_strategy) != "no" else 0)
    _check_values(config)
    checked = TRLSettings(model=str(model), config=config, peft_config=_adapter(peft_config), own=own)
    checked.as_grpo(1)  # checks ours
    return checked


def _check_names(of_trl: Mapping[str, Any], names: list[str]) -> None:
    for name in of_trl:
        if name in _OTHER_NAMES:
            raise TypeError(f"TRL has no setting {name!r}. Use {_OTHER_NAMES[name]}")
        if name not in names:
            near = closest_name(name, [*names, *OWN])
            every = f"Valid settings are those of trl.GRPOConfig, and: {', '.join(OWN)}"
            raise TypeError(f"TRL has no setting {name!r}. {f'Did you mean {near!r}?' if near else every}")


def _check_values(config: Any) -> None:
    """Refuse values of a `GRPOConfig` that are not supported here."""
    for name, (default, why) in _REFUSED.items():
        value = getattr(config, name, default)
        value = getattr(value, "value", value)
        if value != default and (value or default):
            raise BadRequestError(f"{name}={value!r} is not supported by agl.TRL: {why}")
    if config.world_size > 1:
        raise BadRequestError(
            f"agl.TRL requires a single process, but this is one of {config.world_size} (accelerate launch or "
            "torchrun). Start the program with python"
        )
    if isinstance(config.deepspeed, Mapping) and config.deepspeed.get("zero_optimization", {}).get("stage", 0) == 3:
        raise BadRequestError(
            "deepspeed with zero_optimization stage 3 is not supported: the engine that serves the agent cannot read "
            "sharded weights. Use stage 1 or 2"
        )
    passes, window = config.steps_per_generation * config.num_iterations, config.gradient_accumulation_steps
    if passes % window:
        raise BadRequestError(
            f"gradient_accumulation_steps={window} must divide steps_per_generation={config.steps_per_generation} "
            f"times num_iterations={config.num_iterations}; otherwise an optimizer step would use rollouts of two steps"
        )


def _adapter(peft_config: object) -> Any:
    if peft_config is None:
        return None
    from peft import LoraConfig, PeftConfig

    if isinstance(peft_config, Mapping):
        arguments: dict[str, Any] = {"task_type": "CAUSAL_LM", **cast("Mapping[str, Any]", peft_config)}
        return LoraConfig(**arguments)
    if isinstance(peft_config, PeftConfig):
        return peft_config
    raise TypeError(f"peft_config must be a peft.PeftConfig or a dict for peft.LoraConfig; got {peft_config!r}")


def _as_json(values: Mapping[str, object]) -> dict[str, Any]:
    """Return JSON data: sets as sorted lists, enumerations as their values, other objects as their texts."""

    def plain(value: object) -> object:
        return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(getattr(value, "value", value))

    return json.loads(json.dumps(values, default=plain))
