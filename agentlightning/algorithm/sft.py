"""SFT: supervised fine-tuning on chosen rollouts, with the training loop of GRPO."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from typing_extensions import override

from agentlightning.algorithm.grpo import GRPO
from agentlightning.errors import BadRequestError
from agentlightning.training.result import GRPOResult
from agentlightning.training.run_inputs import check_model, check_tasks, triplet_adapter
from agentlightning.training.selection import choose_stored
from agentlightning.training.settings import Pick, accepts, make_settings, signature_of
from agentlightning.training.sft_settings import SFTSettings
from agentlightning.training.tasks import items_of
from agentlightning.types import Dataset

__all__ = ["SFT"]

_STATE_NAME: Final = "chosen"
_CHOSEN_BY: Final = ("rollouts", "from_run", "min_reward", "best_per_task", "top_share")


@dataclass(frozen=True, kw_only=True)
class SFTArguments(SFTSettings):
    """Train a transformers model on chosen rollouts. `SFTSettings` describes each setting."""

    model: str | Path | None = field(default=None, kw_only=False)  # pyright: ignore[reportIncompatibleVariableOverride] -- a path becomes a text
    choose: Pick | None = None


class SFT(GRPO):
    """Train the weights of a transformers model on the replies of selected rollouts.

    `SFT(model="path", min_reward=1.0)` runs the agent on tasks in every step and trains on the chosen rollouts; with
    `rollouts="stored"`, or a list of ids, it trains on rollouts from the store. `SFTSettings` has every setting with
    its meaning and default.

    Args:
        model: folder of the model.
        choose: a function `(rollout, reward) -> bool` that returns whether a rollout may be chosen.

    Raises:
        TypeError: a setting is unknown (the message names the nearest valid one), or `choose` is not a function.
        BadRequestError: the model is missing, no setting chooses rollouts, or a value is out of range.
    """

    @accepts(SFTArguments)
    def __init__(self, model: str | Path | None = None, *, choose: Pick | None = None, **settings: Any) -> None:
        self.settings = make_settings(SFTSettings, model, settings)
        self.group_reward = None
        if choose is not None and not callable(choose):
            raise TypeError(f"choose must be a function (rollout, reward) -> bool; got {choose!r}")
        if choose is None and not self.settings.chooses:
            raise BadRequestError(
                "SFT requires a setting that selects rollouts: min_reward, best_per_task, top_share, rollouts=[ids], "
                "or choose=a function (rollout, reward) -> bool"
            )
        self.pick = choose

    @override
    def recorded_settings(self) -> dict[str, object]:
        named = {} if self.pick is None else {"choose": getattr(self.pick, "__qualname__", type(self.pick).__name__)}
        return {**super().recorded_settings(), **named}

    @override
    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> GRPOResult:
        """Train on rollouts of `train_dataset` or, without it, on stored rollouts. If given, evaluate on `val_dataset`.

        Raises:
            NotFoundError: the store has no rollout with one of the ids.
            NoScoredRolloutError: no rollout of the run had a reward, or none was chosen.
            BadRequestError: no stored rollout is chosen, a listed rollout cannot be trained, the rollouts have another
                tokenizer, or `train_dataset` contradicts `rollouts`; also the errors of `GRPO.run`.
        """
        settings = cast("SFTSettings", self.settings)
        if settings.collects:
            return await super().run(train_dataset, val_dataset)
        if items_of(train_dataset):
            raise BadRequestError(
                f"rollouts={settings.rollouts!r} uses rollouts of the store, but train_dataset has tasks to run. "
                "Remove train_dataset or rollouts="
            )
        check_tasks("SFT", settings, [""], items_of(val_dataset))
        check_model(settings.model)
        return await super().run(await self._chosen_ids(settings), val_dataset)

    async def _chosen_ids(self, settings: SFTSettings) -> list[str]:
        """Return the ids of the rollouts to train; a resumed run uses those that it began with."""
        log, by = self.get_run_log(), {name: getattr(settings, name) for name in _CHOSEN_BY}
        before = await log.latest("state", _STATE_NAME)
        if before is not None and before.data["by"] == by:
            return list(before.data["chosen"])
        chosen, left_out = await choose_stored(self.get_store(), settings, triplet_adapter(self), self.pick)
        await log.state(0, {"by": by, "chosen": chosen, "left_out": left_out}, _STATE_NAME)
        return chosen


SFT.__signature__ = signature_of(  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    SFTSettings,
    inspect.Parameter("choose", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Pick | None"),
)
