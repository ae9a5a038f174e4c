"""Tinker: rollouts as in `agl.GRPO`, with the Tinker service as learner and engine.

The loop, the rows, the advantages, the records and the ledger are those of GRPO. The service samples, computes the
gradient of its `importance_sampling` loss and takes the optimizer step; it is accessed through its own client.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Final

from typing_extensions import override

from agentlightning.algorithm.grpo import GRPO
from agentlightning.base.process_secrets import secret
from agentlightning.errors import BadRequestError
from agentlightning.training.external import installed_version
from agentlightning.training.result import GRPOResult
from agentlightning.training.settings import GRPOSettings, accepts, signature_of
from agentlightning.types import Dataset
from agentlightning.utils.setting_checks import Bounds, check_names, check_number

__all__ = ["Tinker"]

SETTINGS: Final = (
    *("max_steps", "batch_size", "num_generations", "learning_rate", "lr_scheduler_type", "max_grad_norm", "seed"),
    *("lr_scheduler_kwargs", "warmup_steps"),
    *("max_completion_length", "advantage", "scale_rewards", "reward_weights", "multi_objective_aggregation"),
    *("mask_truncated_completions", "soft_punish_cache", "overlong_penalty_factor", "max_num_gen_batches"),
    *("eval_steps", "solved_above", "step_timeout_seconds", "rollout_timeout_seconds", "late_rollouts"),
    *("refused_calls", "max_drift", "alarms", "resource_name", "progress", "output_dir"),
    *("save_steps", "save_total_limit", "max_rows_per_rollout", "top_p", "top_k", "shuffle_dataset", "curriculum"),
)
"""Settings shared with `agl.GRPO`, with the same meaning."""
KEY: Final = "TINKER_API_KEY"


@dataclass(frozen=True, kw_only=True)
class TinkerArguments(GRPOSettings):
    """The settings of `Tinker`, each with its default. Of those of `GRPO` it takes the ones in `SETTINGS`."""

    model: str = field(kw_only=False)
    rank: int = 32
    tokenizer: str | None = None
    base_url: str | None = None
    connect_seconds: float = 60.0


class Tinker(GRPO):
    """Train adapters (LoRA) of a model with the Tinker service on the rewards of an agent's rollouts.

    `Tinker(model="Qwen/Qwen3-8B", max_steps=20, num_generations=8, learning_rate=1e-4)`: `SETTINGS` lists the supported
    settings of `agl.GRPO`. A step is one `forward_backward` over its rows, with a mean over their trained tokens, and
    one `optim_step`. Calls are sampled at temperature 1, at which the service computes its loss. The key is read from
    the environment variable `TINKER_API_KEY`, which is then removed, so that no agent inherits it.

    A checkpoint refers to a state on the service, and a run resumes from the newest checkpoint. The service keeps
    states until they are deleted, including those whose checkpoints `save_total_limit` removes.

    Args:
        model: a base model of the service.
        rank: rank of the adapters.
        tokenizer: folder or name of the tokenizer and the model's configuration, if different from `model`.
        base_url: address of the service; None uses `TINKER_BASE_URL` or, if it is not set, the vendor's address.
        connect_seconds: seconds within which the service must respond at the start of a run.

    Raises:
        TypeError: a setting is unknown. The message names the nearest valid one.
        BadRequestError: the key is missing, or a value is out of range.
    """

    @accepts(TinkerArguments)
    def __init__(
        self,
        model: str,
        *,
        rank: int = 32,
        tokenizer: str | None = None,
        base_url: str | None = None,
        connect_seconds: float = 60.0,
        **settings: Any,
    ) -> None:
        check_names("Tinker", list(settings), SETTINGS, other_names={})
        check_number("rank", rank, int, Bounds(at_least=1))
        check_number("connect_seconds", connect_seconds, float, Bounds(above=0))
        self.settings = GRPOSettings(model=model, record_tokens="none", **settings)
        self.group_reward = None
        self._service: dict[str, Any] = {
            "rank": rank,
            "tokenizer": tokenizer or model,
            "base_url": base_url,
            "connect_seconds": connect_seconds,
        }
        secret(KEY)

    @override
    def recorded_settings(self) -> dict[str, object]:
        return {**super().recorded_settings(), "rank": self._service["rank"]}

    @override
    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> GRPOResult:
        """Train on `train_dataset`. If given, evaluate on `val_dataset` before, during and after training.

        Raises:
            BadRequestError: the service rejects the key or the model, or does not have the state to resume from; also
                the errors of `GRPO.run`.
            EngineError: the service does not respond, or fails. The message names the operation.
        """
        installed_version("tinker", "Tinker")
        from agentlightning.training.external.tinker import run_tinker

        key = secret(KEY)
        if not key:
            raise BadRequestError(f"agl.Tinker requires an API key of the service: set the environment variable {KEY}")
        return await run_tinker(self, self.settings, train_dataset, val_dataset, api_key=key, **self._service)


_OWN = list(inspect.signature(Tinker.__init__).parameters.values())[2:-1]
Tinker.__signature__ = signature_of(GRPOSettings, *_OWN, names=SETTINGS)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
