"""The settings of runs that train weights, and those of GRPO, checked at construction. Does not import torch.

A setting that TRL 1.16's `GRPOConfig` also has keeps its name; VERL 0.9.1's name follows in brackets.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Concatenate,
    Final,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
    get_type_hints,
)

from typing_extensions import override

from agentlightning.base.field_help import explain_fields
from agentlightning.engine.vllm_server import VLLMSettings
from agentlightning.errors import BadRequestError, closest_name
from agentlightning.training.alarms import AlarmSettings, make_rules
from agentlightning.training.loss_settings import (
    Count,
    CountOrZero,
    CriticSettings,
    LossSettings,
    Positive,
    RewardSettings,
    Share,
    name_of,
)
from agentlightning.training.optimizer_settings import OptimizerSettings, ScheduleSettings
from agentlightning.training.progress import Style
from agentlightning.training.rollouts import LatePolicy
from agentlightning.types import Rollout
from agentlightning.utils.setting_checks import Bounds, check_fields, check_names, refuse_pairs

RefusedCalls = Literal["exclude", "train"]
Curricula = Literal["none", "solve_rate"]
RecordTokens = Literal["auto", "all", "sample", "none"]
Pick: TypeAlias = Callable[[Rollout, float], bool]
"""A function of a rollout and its reward that returns whether supervised fine-tuning may train on it."""

P = ParamSpec("P")
S = TypeVar("S", bound="TrainingSettings")

MOST_GROUPS: Final = 512
"""Maximum number of groups in progress; each waits with its own request, which a remote store keeps open."""
OWN_SETTINGS: Final = (
    *("model", "lora", "learning_rate", "lr_scheduler_type", "max_grad_norm", "bf16"),
    *("load_in_4bit", "bnb_4bit_quant_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"),
)
"""Settings that each policy of `policies=` may set for itself."""

_OTHER_NAMES: Final[Mapping[str, str]] = {
    "steps": "max_steps",
    "group_size": "num_generations",
    "schedule": "lr_scheduler_type",
    "epochs": "num_iterations",
    "clip": "epsilon and epsilon_high",
    "max_new_tokens": "max_completion_length",
    "scale": "scale_rewards ('group' for 'std')",
    "eval_every": "eval_steps",
    "generation_kwargs": "top_p, top_k, min_p and repetition_penalty; agents pass other parameters with their calls",
    "importance_sampling_level": "loss_type='gspo' for 'sequence'",
    "adv_estimator": "advantage",
    "max_refills": "max_num_gen_batches",
    "loss_agg_mode": "aggregation",
    "clip_ratio_c": "delta",
    "staleness_threshold": "max_staleness, which counts weight versions",
    "max_head_offpolicyness": "max_staleness",
    "kl_loss_type": "kl_estimator",
    "sampler": "curriculum",
    "shuffle": "shuffle_dataset",
    "optimizer": "optim",
    "betas": "adam_beta1 and adam_beta2",
    "lr_warmup_steps": "warmup_steps",
    **dict.fromkeys(
        ("warmup_ratio", "lr_warmup_steps_ratio"), "warmup_steps, where a number below 1 is a share of max_steps"
    ),
    **{
        f"vllm_importance_sampling_{name}": f"importance_sampling_{name}"
        for name in ("correction", "mode", "clip_max", "clip_min")
    },
    # of TRL; docs/algorithms/settings.md lists them all
    "per_device_train_batch_size": "batch_size, which counts tasks",
    "generation_batch_size": "batch_size times num_generations",
    "steps_per_generation": "minibatch_rollouts, which counts rollouts",
    "gradient_accumulation_steps": "max_tokens_per_forward and minibatch_rollouts",
    "num_train_epochs": "max_steps, which counts steps of batch_size",
    "data_seed": "seed",
    "auto_find_batch_size": "max_tokens_per_forward",
    "fp16": "bf16",
    "activation_checkpointing": "gradient_checkpointing",
    "use_cpu": "device='cpu'",
    "full_determinism": "deterministic",
    "peft_config": "lora, a dict for peft.LoraConfig",
    "model_init_kwargs": "the configuration in the folder of model, or bf16",
    "max_tool_calling_iterations": "a limit in the agent, or rollout_timeout_seconds and max_rows_per_rollout",
    "vllm_importance_sampling_cap": "importance_sampling_clip_max",
    "vllm_mode": "vllm_server_base_url, which is None for a server of the run",
    "vllm_group_port": "vllm_weight_transfer",
    "vllm_max_model_length": "max_model_length",
    "vllm_model_impl": "vllm_args=('--model-impl', ...)",
    "disable_tqdm": "progress='plain'",
    "report_to": "Trainer(trackers=...)",
    "run_name": "Trainer(run_id=...)",
    "resume_from_checkpoint": "Trainer(run_id=...) with the id of the earlier run",
    # of VERL
    "train_batch_size": "batch_size",
    "ppo_mini_batch_size": "minibatch_rollouts, which counts rollouts",
    "ppo_max_token_len_per_gpu": "max_tokens_per_forward",
    "ppo_epochs": "num_iterations",
    "total_training_steps": "max_steps",
    "total_epochs": "max_steps, which counts steps of batch_size",
    "max_response_length": "max_completion_length, which is per model call",
    "clip_ratio_low": "epsilon",
    "clip_ratio_high": "epsilon_high",
    "entropy_coeff": "entropy_coef",
    "kl_loss_coef": "beta",
    "kl_coef": "beta",
    "grad_clip": "max_grad_norm",
    "lr": "learning_rate",
    "lora_rank": "lora={'r': ...}",
    "lora_alpha": "lora={'lora_alpha': ...}",
    "test_freq": "eval_steps",
    "save_freq": "save_steps",
    "max_off_policy_steps": "max_staleness",
}
"""Names that other libraries give to settings, and our names for them."""
_POLICY_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(ScheduleSettings, OptimizerSettings, VLLMSettings):
    """The settings of every algorithm that trains weights: the model, the optimizer and the run."""

    algorithm: ClassVar[str]
    names_elsewhere: ClassVar[Mapping[str, str]]
    """Names of settings in other libraries, and their names here."""
    without_meaning: ClassVar[Mapping[str, str]] = {}
    """Settings of other algorithms, and the reasons why this one lacks them."""
    model_missing: ClassVar[str]
    """Message of the error for a missing model."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """Names of GRPO settings, and the names that this algorithm gives them."""

    model: str
    """Folder of a transformers causal model with tokenizer and chat template, or its name in the local cache.
    [`actor_rollout_ref.model.path`]"""
    max_steps: Count = 100
    """Number of steps. Each step samples `batch_size` tasks and updates the weights.
    [`trainer.total_training_steps`]"""
    batch_size: Count = 16
    """Tasks per step. [`data.train_batch_size`]"""
    shuffle_dataset: bool = True
    """Shuffle the tasks in each pass over the dataset; False keeps the order of the dataset. [`data.shuffle`]"""
    num_generations: Count = 8
    """Rollouts per task and step, G. [`rollout.n`]"""
    num_iterations: Count = 1
    """Passes over the rows of a step. [`actor.ppo_epochs`]"""
    minibatch_rollouts: Count | None = None
    """Rollouts per optimizer step; None takes one optimizer step with all rows. [`actor.ppo_mini_batch_size` times
    `rollout.n`]"""
    temperature: Annotated[float, Bounds(at_least=0.01, at_most=2)] = 1.0
    """Sampling temperature of training and of the sampled evaluation. [`rollout.temperature`]"""
    top_p: Annotated[float, Bounds(above=0, at_most=1)] = 1.0
    """Sample from the smallest set of likeliest tokens with at least this probability; 1.0 samples from all. This
    setting and the next three change only which tokens are sampled: the loss uses the probabilities of the complete
    distribution. They also apply to evaluations. [`rollout.top_p`]"""
    top_k: CountOrZero = 0
    """Number of likeliest tokens to sample from; 0 samples from all. [`rollout.top_k`, where -1 samples from all]"""
    min_p: Annotated[float, Bounds(at_least=0, at_most=1)] | None = None
    """Minimum probability of a sampled token, as a share of that of the likeliest token; None is no minimum. [none]"""
    repetition_penalty: Annotated[float, Bounds(at_least=0.01, at_most=10)] = 1.0
    """Number that divides the positive logits and multiplies the negative logits of tokens that the prompt or the reply
    contains; 1.0 has no effect. [`rollout.repetition_penalty`]"""
    max_completion_length: Count = 512
    """Maximum number of generated tokens per model call. [`data.max_response_length`, which is per rollout]"""
    mask_truncated_completions: bool = False
    """Exclude the tokens of a rollout from the loss, as `over_length`, if one of its calls was truncated at
    `max_completion_length`. Its reward remains in its group. [none]"""
    max_rows_per_rollout: Count | None = 64
    """Maximum number of trained rows per rollout. A rollout with more rows trains on its first ones, and the calls of
    the others are excluded as `row_limit`. None is no limit. [none]"""
    max_grad_norm: Positive = 1.0
    """Maximum norm of the gradient; a larger gradient is scaled down to it. [`actor.grad_clip`]"""
    lora: Mapping[str, object] | None = None
    """Arguments of `peft.LoraConfig`; None trains all weights. [`model.lora_rank`, `model.lora_alpha`]"""
    device: str = "cpu"
    """Device of the model, as a torch device name such as `cuda`."""
    max_model_length: Annotated[int, Bounds(at_least=2)] | None = None
    """Maximum number of tokens of prompt and reply together; a longer call is rejected. None is the context length of
    the model. [`rollout.max_model_len`]"""
    max_tokens_per_forward: Count = 4096
    """Maximum number of tokens in one forward pass; a longer row has its own pass. The gradient is summed over the
    passes of an optimizer step, so this setting limits the memory and changes the result only by rounding.
    [`actor.ppo_max_token_len_per_gpu`]"""
    padding_free: bool = True
    """Join the rows of a forward pass into one sequence without padding, in which rows do not attend to each other. If
    the model does not support this, rows are padded. [`model.use_remove_padding`]"""
    gradient_checkpointing: bool = False
    """Store only the inputs of the layers for the backward pass and recompute the rest, which needs less memory and
    about a third more time. [`model.enable_gradient_checkpointing`]"""
    activation_offloading: bool = False
    """Keep what the backward pass needs in the machine's memory instead of the GPU's, which takes time to copy it there
    and back. In TRL only SFT has it. [`actor.fsdp_config.offload_policy` offloads weights; none]"""
    bf16: bool = False
    """Compute the model in bfloat16. The trained weights have a float32 copy, and probabilities are float32.
    [`actor.fsdp_config.dtype`]"""
    load_in_4bit: bool = False
    """Load the linear layers of the model in 4 bits and train adapters on them (QLoRA); requires `lora` and the package
    `bitsandbytes`. The model that a run writes has its adapters added to the weights as they are in `model`. In TRL it
    is a setting of `ModelConfig`. [none]"""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """The numbers that 4 bits represent, with `load_in_4bit`: those of a normal distribution, or floating-point
    numbers. [none]"""
    eval_steps: CountOrZero = 0
    """Steps between evaluations on the validation set; 0 evaluates only before and after training.
    [`trainer.test_freq`]"""
    solved_above: float | None = None
    """Reward above which a validation task counts as solved, and with `curriculum` a rollout. The share of solved tasks
    is shown with the mean reward. None shows a share only if all rewards are 0 or 1. [no counterpart]"""
    seed: int = 0
    """Seed of sampling, of the order of tasks and rows, and of the initial weights of adapters."""
    output_dir: str | Path | None = None
    """Folder for the model, checkpoints and metrics; None creates `runs/<time>`."""
    save_steps: CountOrZero = 10
    """Steps between checkpoints, in addition to the one at the end; 0 writes only the last one.
    [`trainer.save_freq`]"""
    save_total_limit: Count | None = 2
    """Number of newest checkpoints to keep; None keeps all. [`trainer.max_actor_ckpt_to_keep`]"""
    deterministic: bool = False
    """Make runs reproducible, regardless of timing and number of runners: a reply depends only on the weights, on the
    step, task and sample of its rollout, and on the request. Each reply is decoded separately, which is slower."""
    step_timeout_seconds: Positive = 1800.0
    """Seconds after which an unfinished rollout of a step is late; see `late_rollouts`."""
    late_rollouts: LatePolicy = "drop"
    """Handling of late rollouts. `drop`: cancel and exclude them; the step continues without them. `wait`: restart the
    time limit with each rollout that ends. `resubmit`: cancel them and requeue their tasks once."""
    rollout_timeout_seconds: Positive | None = None
    """Maximum duration of one attempt, in seconds; a longer attempt is excluded. None is `step_timeout_seconds`."""
    refused_calls: RefusedCalls = "exclude"
    """Handling of a scored rollout with a call that finally failed (4xx, or an error after all retries). `exclude`
    excludes it as `refused_call`, because its reward may reflect the failure; `train` trains on it."""
    engine_batch: Count = 64
    """Maximum number of model calls that are generated concurrently."""
    max_drift: Share | None = None
    """Maximum share of turns that template or tokenizer render as other tokens than were sampled; a larger share ends
    the run. None is no limit."""
    record_tokens: RecordTokens = "auto"
    """Trained tokens for which the store keeps the values of the loss: `all`, a `sample` of complete rollouts with
    about 65,000 tokens per step, or `none`. `auto` is `all` for models below 10 million parameters, otherwise
    `sample`."""
    alarms: AlarmSettings = "default"
    """Rules that report conditions of the run: `default`, `none`, or a dict of thresholds by rule, such as
    `{"entropy_collapse": {"share": 0.05}, "token_drift": None}`; None disables a rule. The rules are in
    `agentlightning.training.alarms`."""
    resource_name: str = "main_llm"
    """Name of the resource with which the agent receives the policy."""
    progress: Style = "auto"
    """Display of steps: `live` updates a table, `plain` prints one line per step; `auto` is `live` on a terminal."""

    @override
    def __post_init__(self) -> None:
        self.refuse_metric_schedules()
        check_fields(self)
        self.check_optimizer()
        self.check_schedule()
        if self.lora is not None and not isinstance(self.lora, Mapping):
            raise BadRequestError(f"lora must be a dict for peft.LoraConfig, such as {{'r': 16}}; got {self.lora!r}")
        make_rules(self.alarms)
        self.check_vllm(has_adapters=self.lora is not None)
        pairs = {
            "use_vllm=True and deterministic=True: vLLM's samples depend on concurrent calls": self.use_vllm
            and self.deterministic,
            f"use_vllm=True, temperature={self.temperature} and {', '.join(self.reshaping)}: vLLM returns "
            "probabilities either with all of these settings or with none of them, but the loss needs those with only "
            "the temperature; set temperature=1": self.use_vllm and self.temperature != 1 and bool(self.reshaping),
            "load_in_4bit=True and lora=None: weights in 4 bits are not trained; set lora": self.load_in_4bit
            and self.lora is None,
            "load_in_4bit=True and use_vllm=True: vLLM would sample from the weights without 4 bits": (
                self.load_in_4bit and self.use_vllm
            ),
            f"load_in_4bit=False and bnb_4bit_quant_type={self.bnb_4bit_quant_type!r}: set load_in_4bit": (
                not self.load_in_4bit and self.bnb_4bit_quant_type != "nf4"
            ),
            "activation_offloading=True and device='cpu': the activations are in the machine's memory already": (
                self.activation_offloading and self.device == "cpu"
            ),
        }
        refuse_pairs(pairs)

    @property
    def four_bit(self) -> str | None:
        """The value of `bnb_4bit_quant_type` with `load_in_4bit`, else None."""
        return self.bnb_4bit_quant_type if self.load_in_4bit else None

    @property
    def reshaping(self) -> dict[str, float]:
        """The settings, apart from the temperature, that change the distribution from which tokens are sampled."""
        values = {name: getattr(self, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
        return {name: value for name, value in values.items() if value != getattr(TrainingSettings, name)}

    @property
    def loss_settings(self) -> LossSettings:
        """The settings of the loss."""
        raise NotImplementedError

    @property
    def rewards(self) -> RewardSettings:
        """The settings that turn rewards into advantages."""
        raise NotImplementedError

    @property
    def critic(self) -> CriticSettings | None:
        """The settings of the critic, which computes token advantages; None if each rollout has one advantage."""
        return None

    @property
    def most_stale(self) -> int:
        """Maximum staleness of a trained reply, in weight versions; 0 collects synchronously."""
        return 0

    @property
    def draws_by_solve_rate(self) -> bool:
        """Whether the tasks of a step are drawn by their solve rates."""
        return False

    @property
    def penalizes_rollouts(self) -> bool:
        """Whether the divergence from the reference is subtracted from the reward of a rollout."""
        return self.loss_settings.use_kl_in_reward and self.critic is None

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step; the first step is 1. Errors as in `rate_at`."""
        return self.rate_at(step, self.max_steps)

    def by_policy(self) -> Mapping[str | None, TrainingSettings]:
        """Return the settings of each policy by its name; a run with one policy has the key None."""
        return {None: self}

    def as_json(self) -> dict[str, object]:
        """Return the settings as JSON data; functions as their import paths."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        values["output_dir"] = None if self.output_dir is None else str(self.output_dir)
        if callable(values.get("loss")):
            values["loss"] = name_of(values["loss"])
        return values


@explain_fields
@dataclass(frozen=True, kw_only=True)
class GRPOSettings(LossSettings, RewardSettings, TrainingSettings):
    """Every setting of `GRPO`, with its meaning and default.

    A setting that TRL 1.16's `GRPOConfig` also has keeps its name; VERL 0.9.1's name follows in brackets.
    """

    algorithm = "GRPO"
    names_elsewhere = _OTHER_NAMES
    model_missing = "model must be the folder of a transformers model, or each of policies must have a model"

    curriculum: Curricula = "none"
    """Choice of the tasks of a step: `none` takes them in passes over the dataset. `solve_rate` draws them with the
    weight p (1 - p) + 0.01, where p is the recent solve rate of the task in this run, so that most have a rate near one
    half; an unseen task has one half. A rollout with a reward above `solved_above` is solved. Without `solved_above`, p
    is the mean reward on the scale from the least to the greatest reward of the run, including 0 and 1.
    [`data.sampler`; `buffer` of prime-rl]"""
    max_staleness: Annotated[int, Bounds(at_least=0, at_most=64)] = 0
    """Maximum number of weight versions between the weights that sampled a reply and those that learn from it. 0
    collects synchronously: a step waits for all its rollouts. With n > 0, rollouts continue during updates, with at
    most n + 1 times `batch_size` groups in progress. A group that is older when it ends is dropped as `too_stale`;
    stale tokens of the other groups are corrected (`staleness_clip_max`). [no counterpart:
    `async_training.staleness_threshold` is a share of samples]"""
    policies: Mapping[str, Mapping[str, object]] | None = None
    """Policies that learn in one run, each from its own calls: a list of names, or a mapping from each name to its own
    settings (of `model`, `lora`, `bf16`, `load_in_4bit`, `max_grad_norm`, the learning rate with its schedule, and the
    optimizer). The agent receives each as a resource with its name. Policies with `lora` on the same model share its
    weights. None is one policy. [no counterpart]"""

    @override
    def __post_init__(self) -> None:
        object.__setattr__(self, "policies", read_policies(self.policies))
        self.read_scale()
        TrainingSettings.__post_init__(self)
        self.check_loss()
        self.check_rewards()
        self._check_pairs()
        self.by_policy()

    def _check_pairs(self) -> None:
        cache, length = self.soft_punish_cache, self.max_completion_length
        ahead, groups = self.max_staleness > 0, (self.max_staleness + 1) * self.batch_size
        stale = f"max_staleness={self.max_staleness} and "
        pairs = {
            f"{stale}deterministic=True: the weights that serve a call depend on timing; remove one of them": (
                ahead and self.deterministic
            ),
            f"{stale}batch_size={self.batch_size}: {groups} groups would be in progress, but at most {MOST_GROUPS} "
            "are allowed; reduce one of them": ahead and groups > MOST_GROUPS,
            f"{stale}use_kl_in_reward=True: the divergences of a group would stop the others; set only beta": (
                ahead and self.use_kl_in_reward
            ),
            f"{stale}max_num_gen_batches={self.max_num_gen_batches}: a step does not wait for replacement groups; "
            "omit it": ahead and self.max_num_gen_batches > 1,
            f"{stale}curriculum={self.curriculum!r}: the tasks of a step would depend on timing; remove one of them": (
                ahead and self.draws_by_solve_rate
            ),
            f"curriculum={self.curriculum!r} and shuffle_dataset=False: a curriculum draws the tasks; omit "
            "shuffle_dataset": self.draws_by_solve_rate and not self.shuffle_dataset,
            f"{stale}importance_sampling_mode={self.importance_sampling_mode!r} with importance_sampling_correction="
            "True: a row may have been sampled by several versions of the weights; use 'token_truncate' or "
            "'token_mask'": ahead
            and self.importance_sampling_correction
            and self.importance_sampling_mode.startswith("sequence"),
            f"num_generations=1 and advantage={self.advantage!r}: a group needs at least 2 rollouts; only "
            "'reinforce_plus_plus' compares with the full step": self.num_generations == 1 and self.compares_in_groups,
            "use_kl_in_reward=True and advantage='reinforce_plus_plus': its penalty is a return per token; omit "
            "use_kl_in_reward": self.use_kl_in_reward and self.advantage == "reinforce_plus_plus",
            "use_kl_in_reward=True and advantage='maxrl': it divides by the mean reward, which the penalty makes "
            "negative; omit use_kl_in_reward": self.use_kl_in_reward and self.advantage == "maxrl",
            "use_kl_in_reward=True and multi_objective_aggregation='normalize_then_sum': a penalty has no dimension": (
                self.use_kl_in_reward and self.multi_objective_aggregation == "normalize_then_sum"
            ),
            f"soft_punish_cache={cache} and max_completion_length={length}: the first must not exceed the second": (
                cache is not None and cache > length
            ),
            "use_vllm=True and policies: one vLLM server serves one policy": self.use_vllm
            and self.policies is not None,
            "max_num_gen_batches and advantage='reinforce_plus_plus': it compares with the full step, so it also "
            "learns from groups with equal rewards": (self.max_num_gen_batches > 1 and not self.compares_in_groups),
        }
        refuse_pairs(pairs)

    @property
    @override
    def loss_settings(self) -> LossSettings:
        return self

    @property
    @override
    def rewards(self) -> RewardSettings:
        return self

    @property
    @override
    def most_stale(self) -> int:
        return self.max_staleness

    @property
    @override
    def draws_by_solve_rate(self) -> bool:
        return self.curriculum == "solve_rate"

    @override
    def by_policy(self) -> Mapping[str | None, GRPOSettings]:
        """Return the settings of each policy by its name; a run with one policy has the key None.

        Raises:
            BadRequestError: a setting of a policy is out of range. The message names the policy.
        """
        if self.policies is None:
            return {None: self}
        settings: dict[str | None, GRPOSettings] = {}
        for name, own in self.policies.items():
            changes: dict[str, Any] = dict(own)
            try:
                settings[name] = dataclasses.replace(self, policies=None, **changes)
            except BadRequestError as error:
                raise BadRequestError(f"policies[{name!r}]: {error}") from None
        return settings


def setting_names(cls: type[TrainingSettings]) -> list[str]:
    """Return the names of the settings that an algorithm accepts."""
    refused = {*cls.names_elsewhere, *cls.without_meaning}
    return [field.name for field in dataclasses.fields(cls) if field.name not in refused]


def make_settings(cls: type[S], model: str | Path | None, settings: Mapping[str, Any]) -> S:
    """Return checked settings of an algorithm.

    Raises:
        TypeError: a setting is unknown or not supported by the algorithm. The message names the nearest one.
        BadRequestError: a value is out of range, or the model is missing.
    """
    names, elsewhere = setting_names(cls), cls.names_elsewhere
    check_names(cls.algorithm, list(settings), names, other_names=elsewhere, without_meaning=cls.without_meaning)
    if model is None:
        named = [own.get("model") for own in (read_policies(settings.get("policies")) or {}).values()]
        if not named or None in named:
            raise BadRequestError(f"{cls.model_missing}; got None")
        model = str(named[0])
    return cls(model=str(model) if isinstance(model, Path) else model, **settings)


def read_policies(policies: object) -> dict[str, dict[str, object]] | None:
    """Return the settings of each policy of `policies=` by name; None for one policy without a name.

    Policies from a list of names share all settings.

    Raises:
        BadRequestError: it is neither a list nor a mapping, or has an invalid name or setting.
    """
    if policies is None:
        return None
    if isinstance(policies, (list, tuple)):
        policies = {name: dict[str, object]() for name in cast("list[object]", policies)}
    if not isinstance(policies, Mapping) or not policies:
        raise BadRequestError(
            "policies must be a list of names or a dict of settings by name, such as ['planner', 'solver'] or "
            f"{{'planner': {{'model': 'folder'}}, 'solver': {{}}}}; got {policies!r}"
        )
    by_name: dict[str, dict[str, object]] = {}
    for name, own in cast("Mapping[object, object]", policies).items():
        if not isinstance(name, str) or not _POLICY_NAME.fullmatch(name):
            raise BadRequestError(f"policies: {name!r} is not a valid name; use 1 to 128 letters, digits, '-' and '_'")
        if not isinstance(own, Mapping):
            raise BadRequestError(f"policies[{name!r}] must be a dict of settings, such as {{}}; got {own!r}")
        fields = cast("Mapping[str, object]", own)
        for field in fields:
            if field not in OWN_SETTINGS:
                near = closest_name(str(field), OWN_SETTINGS)
                hint = f"did you mean {near!r}?" if near else f"valid settings are {', '.join(OWN_SETTINGS)}"
                raise BadRequestError(f"policies[{name!r}] cannot set {field!r}: {hint}")
        by_name[name] = {key: str(value) if key == "model" else value for key, value in fields.items()}
    return by_name


def accepts(arguments: Callable[P, object]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Declare to type checkers and editors that a constructor accepts the fields of the dataclass `arguments`."""
    del arguments
    return lambda constructor: constructor


def signature_of(
    settings: type[TrainingSettings], *more: inspect.Parameter, names: Sequence[str] | None = None
) -> inspect.Signature:
    """Return the signature of a constructor with the model, settings by name (all settings of the algorithm, or
    `names`) and `more` parameters, for help texts and command lines."""
    fields, hints = {field.name: field for field in dataclasses.fields(settings)}, get_type_hints(settings)
    own = [inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="str | Path")]
    own += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=fields[name].default, annotation=hints[name])
        for name in names or setting_names(settings)
        if name != "model"
    ]
    return inspect.Signature([*own, *more])
