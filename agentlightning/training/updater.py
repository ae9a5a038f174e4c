"""`Updater`: the trainer of a run, called by the loop. Implemented by our learner (`policies.py`) and in `external/`.

The run has one weight version for all policies: an update that changes any policy creates a new version for all, so
that the version of a call identifies the update before it, for every policy.
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
from agentlightning.training.settings import TrainingSettings

if TYPE_CHECKING:
    from agentlightning.adapter.rows.samples import Sample
    from agentlightning.training.learner.figures import RowFigures


class DrainTimeoutError(TimeoutError):
    """Model calls were still running when the weights should have changed; no weights were changed."""


class _NothingChanged(Exception):
    """Ends a weight change without a new version, because no weight changed."""


@dataclass(frozen=True)
class Learner:
    """One policy that learns: its settings and its served model."""

    name: str | None
    """Name of the gateway's policy; None for the only policy of a run, which learns from all calls that the adapter
    selects."""
    settings: TrainingSettings
    policy: ServedModel

    def takes(self, sample: Sample) -> bool:
        """Return whether a row belongs to this policy."""
        return self.name is None or sample.policy == self.name


@dataclass
class StepUpdate:
    """The effect of a step's update on every policy."""

    figures: dict[str, float]
    """`steps` and `skipped_steps` count optimizer steps; the other metrics, under their names in `Policy.update`, are
    present if the trainer measures them. If there are several policies, the metrics of each are `NAME/METRIC`."""
    rows: Sequence[RowFigures] = ()
    """(B,) values of each row in the loss, in the order of the samples; empty if unknown."""
    changed: frozenset[str | None] = frozenset()
    """The policies whose weights changed."""
    untrained: frozenset[str] = frozenset()
    """Rollouts that the trainer excluded itself."""
    alarms: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Warnings for the user: name and text."""


class Updater:
    """The trainer of a run, and the engines that serve its policies. Belongs to the loop of the run."""

    evaluates_first = True
    """Whether held-out tasks run before the first step."""
    updates_without_rows = False
    """Whether `update` is also called for a step without rows."""

    def __init__(self, learners: Sequence[Learner], engines: Sequence[PolicyEngine] = ()) -> None:
        self.learners = tuple(learners)
        """The policies that learn."""
        self.engines = tuple(engines)
        """The engines that serve them, in order; empty if nothing is sampled, as in a replay."""
        self.saves_every = self.learners[0].settings.save_steps
        """Steps between two checkpoints; 0 writes only one at the end."""

    # --- what a subclass defines -------------------------------------------------------------------------------------

    def update_weights(self, step: int, rows: StepRows) -> StepUpdate:
        """Learn from the rows of a step, and serve the new weights with the next `weight_version`. Called on a thread,
        within `paused`.

        A trainer that computes its own advantages writes them to `rows.advantages`, from which the ledger reads them.
        """
        raise NotImplementedError

    def digest(self) -> str:
        """Return a digest of the weights of all policies; equal weights have equal digests."""
        raise NotImplementedError

    def save_checkpoint(self, folder: Path, step: int) -> None:
        """Write the state from which a later start resumes into a folder.

        Raises:
            OSError: it cannot be written.
        """
        raise NotImplementedError

    def save_model(self, folder: Path) -> None:
        """Write the model of the policy into the folder; several policies go into subfolders with their names."""
        raise NotImplementedError

    # --- what a subclass may define ----------------------------------------------------------------------------------

    def divergences(self, samples: Sequence[Sample]) -> list[float]:
        """Return the divergence of each row from its policy's reference, in nats, for `use_kl_in_reward`: (B,)."""
        raise NotImplementedError

    def can_save(self, step: int, weight_version: int) -> bool:
        """Return whether the weights of this version, after a step, can be saved now."""
        return self.weight_version == weight_version

    def checkpoint_facts(self) -> dict[str, Any]:
        """Return the facts of a checkpoint's weights in addition to their digest, as JSON data."""
        return {}

    async def before_step(self, proxy: LLMProxy) -> None:
        """Prepare a step, whose rollouts are not started yet; `proxy` is the gateway of the run."""

    async def after_evaluation(self, step: int, evaluation: Evaluation, store: LightningStore) -> None:
        """Handle an evaluation after a step."""

    async def end(self) -> None:
        """Finish after the last step."""

    # --- what all have -----------------------------------------------------------------------------------------------

    async def update(self, step: int, rows: StepRows, proxy: LLMProxy, drain_seconds: float) -> StepUpdate:
        """Run `update_weights` while no model call is in progress; later calls are recorded with the new version, if
        there is one. The gateway waits for its calls; `paused` also waits for calls that our engine still computes
        although their clients have disconnected.

        Raises:
            DrainTimeoutError: calls were still running after `drain_seconds`, or an engine was still computing after
                `step_timeout_seconds`; no weights were changed.
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
                        f"step {step}: the update of the weights timed out, possibly after changing them: "
                        f"{error!r}. It is not repeated. Start the run again to resume from its newest checkpoint"
                    ) from error
                if not update.changed:
                    raise _NothingChanged
        assert update is not None
        return update

    @property
    def names(self) -> list[str] | None:
        """Names of the policies; None if one policy learns from every call."""
        return [each.name for each in self.learners if each.name is not None] or None

    @property
    def weight_version(self) -> int:
        """Number of updates of the run that changed weights."""
        return max(each.policy.weight_version for each in self.learners)

    def advance(self, version: int) -> None:
        """Set this version for every policy, including those whose weights did not change."""
        for each in self.learners:
            each.policy.weight_version = version

    def gives_probabilities(self) -> bool:
        """Return whether every policy can be sampled from."""
        return all(each.policy.gives_probabilities() for each in self.learners)

    def decoder(self) -> Decode | None:
        """Return a function that decodes token ids; None if the policies have several vocabularies."""
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
        """Open the block in which the weights may change: the engines are paused, with no calls in progress.

        Raises:
            DrainTimeoutError: an engine was still computing after `timeout` seconds; the block was not run.
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
        """Return the totals of all engines since their start."""
        stats = [engine.stats() for engine in self.engines]
        names = [field.name for field in dataclasses.fields(EngineStats)]
        return EngineStats(**{name: sum(getattr(one, name) for one in stats) for name in names})
