"""`Updater`: what learns in a run, as the loop drives it. Makers: our learner (`policies.py`) and those in `external/`.

One weight version counts for the whole run: an update that changed any policy makes a new one for all, so that a call's
stamp says which update it came after, whichever policy answered it.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentlightning.adapter.rows.samples import Decode
from agentlightning.engine.policy_engine import EngineStats, PolicyEngine
from agentlightning.engine.served import ServedModel
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.base import LightningStore
from agentlightning.training.result import Evaluation
from agentlightning.training.rows import StepRows
from agentlightning.training.settings import GRPOSettings

if TYPE_CHECKING:
    from agentlightning.adapter.rows.samples import Sample
    from agentlightning.training.learner.figures import RowFigures


class DrainTimeoutError(TimeoutError):
    """Model calls were still running when the weights were to change; no weight was changed."""


class _NothingChanged(Exception):
    """Leaves a weight change without a new version: the weights are the old ones."""


@dataclass(frozen=True)
class Learner:
    """One policy that learns: its settings and what is served of it."""

    name: str | None
    """The name of the gateway's policy; None for the only one of a run, which learns from all calls that the adapter
    selects."""
    settings: GRPOSettings
    policy: ServedModel

    def takes(self, sample: Sample) -> bool:
        """Return whether a row is of this policy."""
        return self.name is None or sample.policy == self.name


@dataclass
class StepUpdate:
    """The effect of a step's update on every policy."""

    figures: dict[str, float]
    """`steps` and `skipped_steps` count optimizer steps; all others are there where the trainer knows them, under the
    names that `Policy.update` gives them. Where there are several policies, those of each beside, under
    `NAME/FIGURE`."""
    rows: Sequence[RowFigures] = ()
    """(B,) figures of each row that the loss used, in the order of the samples; empty if they are not known."""
    changed: frozenset[str | None] = frozenset()
    """The policies whose weights took a step."""
    untrained: frozenset[str] = frozenset()
    """Rollouts that were handed over and that the trainer left out."""
    alarms: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Warnings for the user: name and text."""


class Updater:
    """What learns in a run, and the engines that serve what it has learned. Belongs to the loop of the run.

    Attributes:
        learners: the policies that learn.
        engines: what serves them, in their order; none where nothing is sampled, as in a replay.
        saves_every: steps between two checkpoints; 0 writes one at the end alone.
        evaluates_first: whether held-out tasks are run before the first step.
        updates_without_rows: whether `update` is to be called for a step without rows, too.
    """

    evaluates_first = True
    updates_without_rows = False

    def __init__(self, learners: Sequence[Learner], engines: Sequence[PolicyEngine] = ()) -> None:
        self.learners = tuple(learners)
        self.engines = tuple(engines)
        self.saves_every = self.learners[0].settings.save_steps

    # --- what a subclass defines -------------------------------------------------------------------------------------

    def update_weights(self, step: int, rows: StepRows) -> StepUpdate:
        """Learn from the rows of a step, and serve the new weights with the next `weight_version`. Called on a thread,
        within `paused`.

        A trainer that makes advantages of its own writes them over `rows.advantages`, from where the ledger has them.
        """
        raise NotImplementedError

    def digest(self) -> str:
        """Return what equal weights of all policies have in common."""
        raise NotImplementedError

    def save_checkpoint(self, folder: Path, step: int) -> None:
        """Write into a folder what a later start goes on from.

        Raises:
            OSError: it cannot be written.
        """
        raise NotImplementedError

    def save_model(self, folder: Path) -> None:
        """Write the model of each policy: into the folder itself, or into one of its name where there are several."""
        raise NotImplementedError

    # --- what a subclass may define ----------------------------------------------------------------------------------

    def divergences(self, samples: Sequence[Sample]) -> list[float]:
        """Return the divergence of each row from its policy's reference, in nats, for `use_kl_in_reward`: (B,)."""
        raise NotImplementedError

    def can_save(self, step: int, weight_version: int) -> bool:
        """Return whether the weights after a step, which had this version, can be saved now."""
        return self.weight_version == weight_version

    def checkpoint_facts(self) -> dict[str, Any]:
        """Return what a checkpoint says of its weights beside their digest, as JSON data."""
        return {}

    async def before_step(self, proxy: LLMProxy) -> None:
        """Prepare a step, whose rollouts are not started yet; `proxy` is the gateway of the run."""

    async def after_evaluation(self, step: int, evaluation: Evaluation, store: LightningStore) -> None:
        """Take notice of an evaluation after a step."""

    async def end(self) -> None:
        """End after the last step."""

    # --- what all have -----------------------------------------------------------------------------------------------

    async def update(self, step: int, rows: StepRows, proxy: LLMProxy, drain_seconds: float) -> StepUpdate:
        """Run `update_weights` while no model call is in progress; later calls are stamped with the new version, if
        there is one. The gateway waits for the calls that it knows, `paused` also for what an engine of ours still
        computes for a client that left.

        Raises:
            DrainTimeoutError: calls still ran after `drain_seconds`, or an engine still computed after
                `step_timeout_seconds`; no weight was changed.
            TimeoutError: the update itself timed out, perhaps after it had changed weights.
        """

        def while_paused() -> StepUpdate:
            with self.paused(self.learners[0].settings.step_timeout_seconds):
                return self.update_weights(step, rows)

        update: StepUpdate | None = None
        with suppress(_NothingChanged):
            async with AsyncExitStack() as stack:
                change = proxy.weight_change(self.weight_version + 1, drain_timeout=drain_seconds)
                try:
                    await stack.enter_async_context(change)
                except TimeoutError as error:
                    raise DrainTimeoutError(str(error)) from error
                try:
                    update = await asyncio.to_thread(while_paused)
                except DrainTimeoutError:
                    raise
                except TimeoutError as error:
                    raise TimeoutError(
                        f"step {step}: the update of the weights timed out, perhaps after it had changed them: "
                        f"{error!r}. It is not repeated. Start the run again to go on from its newest checkpoint"
                    ) from error
                if not update.changed:
                    raise _NothingChanged
        assert update is not None
        return update

    @property
    def names(self) -> list[str] | None:
        """Of the policies; None where one learns from every call."""
        return [each.name for each in self.learners if each.name is not None] or None

    @property
    def weight_version(self) -> int:
        """How many updates of the run took a step."""
        return max(each.policy.weight_version for each in self.learners)

    def advance(self, version: int) -> None:
        """Give every policy this version, those too whose weights an update left as they were."""
        for each in self.learners:
            each.policy.weight_version = version

    def gives_probabilities(self) -> bool:
        """Return whether every policy can be sampled from."""
        return all(each.policy.gives_probabilities() for each in self.learners)

    def decoder(self) -> Decode | None:
        """Return what turns token ids into text; None if the policies have several vocabularies."""
        tokenizers = [each.policy.tokenizer for each in self.learners]
        if any(other.get_vocab() != tokenizers[0].get_vocab() for other in tokenizers[1:]):
            return None
        own = copy.deepcopy(tokenizers[0])  # the engine's thread uses the other one

        def decode(token_ids: Sequence[int]) -> str:
            text = own.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            return cast("str", text)

        return decode

    @contextmanager
    def paused(self, timeout: float) -> Generator[None]:
        """Open the block in which the weights may change: the engines are paused, with nothing in flight.

        Raises:
            DrainTimeoutError: an engine still computed after `timeout` seconds; the block was not run.
        """
        with ExitStack() as stack:
            for engine in self.engines:
                try:
                    stack.enter_context(engine.paused(timeout))
                except TimeoutError as error:
                    raise DrainTimeoutError(str(error)) from error
            yield

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the locks of the weights of every policy."""
        with ExitStack() as stack:
            for each in self.learners:
                stack.enter_context(each.policy.lock)
            yield

    def stats(self) -> EngineStats:
        """Return the sums of all engines since their start."""
        stats = [engine.stats() for engine in self.engines]
        names = [field.name for field in dataclasses.fields(EngineStats)]
        return EngineStats(**{name: sum(getattr(one, name) for one in stats) for name in names})
