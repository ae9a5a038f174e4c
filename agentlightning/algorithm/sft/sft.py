"""SFT as the Trainer sees it. The run is that of GRPO: the loop, the records, checkpoints and the learner are in
`agentlightning.algorithm.grpo`; what is chosen, and how, is in its `chosen/`."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, Final, Self

from typing_extensions import override

from agentlightning.algorithm.grpo.grpo import GRPO
from agentlightning.errors import BadRequestError
from agentlightning.training.chosen.choosing import Pick
from agentlightning.training.chosen.sft_settings import SFTSettings, make_sft_settings, sft_setting_names
from agentlightning.training.chosen.stored import choose_stored
from agentlightning.training.result import GRPOResult
from agentlightning.training.run_inputs import check_model, check_tasks
from agentlightning.training.tasks import items_of
from agentlightning.types import Dataset

__all__ = ["SFT"]

_CHOICE_NAME: Final = "chosen"
_CHOSEN_BY: Final = ("rollouts", "from_run", "min_reward", "best_per_task", "top_share")


class SFT(GRPO):
    """Train the weights of a transformers model to say what chosen rollouts said.

    `SFT(model="path", min_reward=1.0)` runs the agent on tasks in every step and trains the rollouts that are chosen;
    with `rollouts="stored"`, or a list of ids, those that the store has. Every setting, its meaning and its default are
    in `SFTSettings`.

    Args:
        model: folder of the model.
        choose: a function `(rollout, reward) -> bool` that says whether a rollout may be chosen.

    Raises:
        TypeError: an unknown setting, and the nearest right one; or `choose` is no function.
        BadRequestError: there is no model, nothing says what is chosen, or a value is out of its range.
    """

    def __init__(self, model: str | Path | None = None, *, choose: Pick | None = None, **settings: Any) -> None:
        own = self.settings = make_sft_settings(model, settings)
        self._own: SFTSettings = own
        self.group_reward = None
        if choose is not None and not callable(choose):
            raise TypeError(f"choose must be a function (rollout, reward) -> bool; got {choose!r}")
        if choose is None and not own.chooses:
            raise BadRequestError(
                "SFT needs to be told which rollouts to train: min_reward, best_per_task or top_share, "
                "rollouts=[ids], or choose=a function (rollout, reward) -> bool"
            )
        self.pick = choose

    @override
    def with_iterations(self, max_iterations: int) -> Self:
        twin = super().with_iterations(max_iterations)
        twin._own = dataclasses.replace(self._own, max_steps=max_iterations)
        return twin

    @override
    def recorded_settings(self) -> dict[str, object]:
        named = {} if self.pick is None else {"choose": getattr(self.pick, "__qualname__", type(self.pick).__name__)}
        return {**super().recorded_settings(), **named}

    @override
    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> GRPOResult:
        """Train on rollouts of `train_dataset`, or on stored ones without it; measure on `val_dataset`, if given.

        Raises:
            NotFoundError: the store has no rollout of an id that was given.
            NoScoredRolloutError: no rollout of the whole run had a reward, or none was chosen.
            BadRequestError: no stored rollout is chosen, one that was named cannot be trained, the rollouts are of
                another tokenizer, or `train_dataset` does not go with what was asked; and what `GRPO.run` raises.
        """
        if self._own.collects:
            return await super().run(train_dataset, val_dataset)
        if items_of(train_dataset):
            raise BadRequestError(
                f"rollouts={self._own.rollouts!r} takes rollouts of the store, and train_dataset has tasks to run: "
                "leave train_dataset out, or rollouts="
            )
        self._check_held_out(val_dataset)
        check_model(self._own.model)
        return await super().run(await self._chosen_ids(), val_dataset)

    def _check_held_out(self, val_dataset: Dataset[Any] | None) -> None:
        check_tasks("SFT", self.settings, [""], items_of(val_dataset))

    async def _chosen_ids(self) -> list[str]:
        """Return the rollouts to train; a run that goes on takes those that it began with."""
        log, own = self.get_run_log(), self._own
        by = {name: getattr(own, name) for name in _CHOSEN_BY}
        before = await log.latest("state", _CHOICE_NAME)
        if before is not None and before.data["by"] == by:
            return list(before.data["chosen"])
        choice = await choose_stored(self.get_store(), own, self._triplet_adapter(), self.pick)
        await log.state(0, {"by": by, "chosen": choice.chosen, "left_out": choice.left_out}, _CHOICE_NAME)
        return choice.chosen


def _signature() -> inspect.Signature:
    """Return the constructor's signature with every setting by name, for help texts and command lines."""
    fields = {field.name: field for field in dataclasses.fields(SFTSettings)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="str | Path")]
    own += [
        inspect.Parameter(name, keyword, default=fields[name].default, annotation=fields[name].type)
        for name in sft_setting_names()
    ]
    return inspect.Signature([*own, inspect.Parameter("choose", keyword, default=None, annotation="Pick | None")])


SFT.__signature__ = _signature()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
