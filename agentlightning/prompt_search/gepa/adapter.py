"""The package's view of a search: its adapter and its callback, on rollouts of the store and records of the run.

The package works in a thread of its own; everything that touches the store is done in the event loop of the algorithm.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from gepa.core.adapter import EvaluationBatch
from gepa.core.callbacks import IterationEndEvent, IterationStartEvent, MergeAttemptedEvent
from gepa.core.state import GEPAState

from agentlightning.chat.chat import Chat
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.prompt_search.cases import RolloutResult
from agentlightning.prompt_search.gepa.reflection import Proposed, Record
from agentlightning.prompt_search.gepa.saved import REWARDS, TASKS, SavedSearch, digest_of_tasks
from agentlightning.prompt_search.history import WITHOUT_TEXT, History, PromptVersion
from agentlightning.prompt_search.playing import PromptPlayer, digest_of
from agentlightning.prompt_search.scores import MissingPolicy, NoCandidateError, score_of, score_of_rewards
from agentlightning.training.runs.log import RunLog
from agentlightning.types import PromptTemplate, RolloutMode

logger = logging.getLogger("agentlightning.algorithm.gepa")
T = TypeVar("T")
Candidate = dict[str, str]
Batch = EvaluationBatch[RolloutResult, RolloutResult]


class Interrupted(Exception):
    """The run was cancelled; ends the package's thread."""


class LoopBridge:
    """Calls of the package's thread into the event loop. `close` breaks off the one that is waited for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._closed = loop, False
        self._running: asyncio.Task[Any] | None = None

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine gives in the event loop.

        Raises:
            Interrupted: the run was cancelled.
        """
        if self._closed:
            work.close()
            raise Interrupted("the run was cancelled")

        async def run() -> T:
            self._running = asyncio.current_task()
            if self._closed:
                work.close()
                raise asyncio.CancelledError
            return await work

        try:
            return asyncio.run_coroutine_threadsafe(run(), self._loop).result()
        except CancelledError:
            raise Interrupted("the run was cancelled") from None

    def close(self) -> None:
        """Let no further call begin, and cancel the one that runs. Called in the event loop."""
        self._closed = True
        if self._running is not None and not self._running.done():
            self._running.cancel()


@dataclass(frozen=True, slots=True)
class Task:
    """An item of a data set, with what it is played for."""

    mode: RolloutMode
    input: Any


class StoreAdapter:
    """Plays candidates, and keeps versions: `GEPAAdapter` and callback of the package in one.

    A task that earned nothing has the mean of the others of its candidate, a little less than it: so it moves no mean,
    and a minibatch with a fault is never taken for a perfect one. A candidate that earned something on too few tasks is
    never the best.
    """

    propose_new_texts = None

    def __init__(
        self,
        bridge: LoopBridge,
        player: PromptPlayer,
        history: History,
        log: RunLog,
        chat: Chat,
        records: Callable[[Mapping[str, PromptTemplate], Sequence[RolloutResult], str], Sequence[Record]],
        *,
        seed: PromptVersion,
        val: Sequence[Any],
        missing: MissingPolicy,
        minimum_coverage: float,
    ) -> None:
        self._bridge, self._player, self._history, self._log, self._chat = bridge, player, history, log, chat
        self._records, self._seed, self._val = records, seed, val
        self._tasks = digest_of_tasks(val)
        self._missing: MissingPolicy = missing
        self._coverage = minimum_coverage
        self._versions = {seed.digest: seed}
        self._unrecorded: list[PromptVersion] = []
        self._known_seed_scores: Mapping[int, float] | None = None
        self.validated: dict[str, list[float | None]] = {}
        """What versions earned on the validation tasks, by their digests."""
        self.iteration = 0
        """The present one; 0 is before the first."""
        self.error: Exception | None = None
        """What ended the making of records for the model: the package says it in its log and goes on."""
        self._names: dict[int, str] = {}

    # --- versions ------------------------------------------------------------------------------------------------

    def templates_of(self, candidate: Candidate) -> dict[str, PromptTemplate]:
        """Return the templates that a candidate is the texts of."""
        return {name: t.model_copy(update={"template": candidate[name]}) for name, t in self._seed.templates.items()}

    def version_of(self, candidate: Candidate) -> PromptVersion:
        """Return the version of a candidate, a new one if it is not known."""
        templates = self.templates_of(candidate)
        found = self._versions.get(digest_of(templates))
        if found is None:
            changed = [name for name, t in templates.items() if t != self._seed.templates[name]]
            found = self._add(PromptVersion("", templates, changed[0] if changed else self._seed.target))
        return found

    def _add(self, version: PromptVersion) -> PromptVersion:
        version.version = self._history.next_names(1)[0]
        version.round = self.iteration
        self._history.add([version])
        self._unrecorded.append(version)
        if version.state not in WITHOUT_TEXT:
            self._versions[version.digest] = version
        return version

    def restore(self, versions: Sequence[PromptVersion], saved: SavedSearch | None) -> None:
        """Take over the versions of an earlier start: those that the run has recorded, and those that were saved."""
        self._history.add(versions)
        self._versions |= {v.digest: v for v in versions if v.state not in WITHOUT_TEXT}
        if saved is None:
            return
        self._known_seed_scores = saved.seed_scores
        self._names = {}
        for place, (candidate, parents) in enumerate(zip(saved.candidates, saved.parents, strict=True)):
            version = self.version_of(candidate)
            names = [self._names[parent] for parent in parents if parent is not None]
            version.parent = version.parent or " + ".join(names) or None
            self._names[place] = version.version
            if (rewards := saved.rewards.get(version.digest)) is not None:
                version.state = "kept"
                version.judged(score_of_rewards(rewards, self._missing))
                self.validated[version.digest] = list(rewards)
        self._unrecorded = []

    def get_adapter_state(self) -> dict[str, Any]:
        """Return what the package saves with its own state."""
        rewards = {digest: list(rewards) for digest, rewards in self.validated.items()}
        return {REWARDS: rewards, TASKS: self._tasks}

    def best(self) -> PromptVersion:
        """Return the version with the greatest mean on all validation tasks; the seed if no other has a greater one.

        One that earned something on too few tasks, or was played on a part of them, is none.
        """
        whole = [
            each
            for each in self._history.versions
            if each.state == "kept"
            and each.score is not None
            and each.tasks >= len(self._val)
            and each.tasks - each.failures >= self._coverage * each.tasks
        ]
        best = max(whole, key=lambda each: each.score or 0.0, default=self._seed)
        return self._seed if best.score == self._seed.score else best

    def proposed(self, proposed: Proposed, parent: Candidate, name: str) -> None:
        """Take over what the model proposed for one component of a candidate."""
        known = self.version_of(parent)
        text = parent[name] if proposed.text is None else proposed.text
        templates = self.templates_of({**parent, name: text})
        version = PromptVersion("", templates, name, parent=known.version, critique=proposed.critique)
        version.state, version.problems, version.bill = proposed.state, proposed.problems, proposed.bill
        if proposed.text is not None and version.digest in self._versions:
            version.state = "duplicate"
        self._add(version)

    # --- the adapter of the package --------------------------------------------------------------------------------

    def evaluate(self, batch: list[Task], candidate: Candidate, capture_traces: bool = False) -> Batch:
        """Play one candidate; see `batch_evaluate`."""
        if self._known_seed_scores is not None and self.version_of(candidate) is self._seed:
            scores, self._known_seed_scores = self._known_seed_scores, None
            if all(place in scores for place in range(len(batch))):
                return EvaluationBatch([_unseen()] * len(batch), [scores[place] for place in range(len(batch))])
        return self.batch_evaluate([(candidate, batch)])[0]

    def batch_evaluate(self, items: list[tuple[Candidate, list[Task]]]) -> list[Batch]:
        """Play candidates, all of them in one round, and return scores, results, and results as trajectories.

        Raises:
            LimitReached: the limit on seconds has cut it off.
        """

        async def play_all() -> list[list[RolloutResult]]:
            return await asyncio.gather(*(self._play(candidate, batch) for candidate, batch in items))

        return [EvaluationBatch(results, self._scores(results), results) for results in self._bridge.call(play_all())]

    def make_reflective_dataset(
        self, candidate: Candidate, eval_batch: Batch, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Record]]:
        """Return what the model is shown for each component."""
        templates = self.templates_of(candidate)
        try:
            shown = eval_batch.trajectories or []
            return {name: list(self._records(templates, shown, name)) for name in components_to_update}
        except Exception as error:  # an override of the user's: ends the search, see `Stopper`
            self.error = error
            raise

    async def _play(self, candidate: Candidate, batch: Sequence[Task]) -> list[RolloutResult]:
        if not batch:
            return []
        version, mode = self.version_of(candidate), batch[0].mode
        results = await self._player.play(version.version, version.templates, [task.input for task in batch], mode)
        if self._chat.seconds_left() <= 0 and any(result["final_reward"] is None for result in results):
            self._chat.check_limits()  # cut off by the limit, which says nothing about the candidate
        if mode == "val":
            await self._validated(version, results, [task.input for task in batch])
        return results

    async def _validated(self, version: PromptVersion, results: list[RolloutResult], tasks: Sequence[Any]) -> None:
        score = score_of(results, self._missing)
        if version is self._seed and not score.scored:
            failures = ", ".join(sorted({str(result["failure"]) for result in results}))
            raise NoCandidateError(f"The seed earned nothing on any of {len(tasks)} validation tasks: {failures}")
        if len(tasks) < len(self._val):  # the package tries a merged candidate on a few of them
            if version.digest not in self.validated:
                version.judged(score)
            return
        version.judged(score)
        version.state = "kept" if version is self._seed or score.coverage >= self._coverage else "dropped"
        rewards = [result["final_reward"] for result in results]
        self.validated[version.digest] = rewards
        data: dict[str, object] = {"rewards": rewards, "tasks": tasks_of(tasks), "version": version.version}
        data["failures"] = [result["failure"] for result in results]
        name = "validation" if version is self._seed else f"validation of {version.version}"
        value = score.mean if version.state == "kept" else None  # too few of the tasks earned something
        await self._log.evaluation(self.iteration, name, data, value=value, counts_for_best=False)

    def _scores(self, results: Sequence[RolloutResult]) -> list[float]:
        score = score_of(results, self._missing)
        if score.mean is None or score.coverage < self._coverage:
            return [-math.inf] * len(results)
        neutral = math.nextafter(score.mean, -math.inf)
        return [neutral if (reward := result["final_reward"]) is None else reward for result in results]

    # --- the callback of the package -------------------------------------------------------------------------------

    def on_iteration_start(self, event: IterationStartEvent) -> None:
        """Number what is made from now on."""
        self.iteration = event["iteration"]

    def on_merge_attempted(self, event: MergeAttemptedEvent) -> None:
        """Note which versions a merged one comes from."""
        version, parents = self.version_of(event["merged_candidate"]), event["parent_ids"]
        if version is not self._seed and version.parent is None:  # not one that was there already
            version.parent = " + ".join(self._names[each] for each in parents if each in self._names) or None

    def on_iteration_end(self, event: IterationEndEvent) -> None:
        """Record the versions and the figures of an iteration."""
        state = cast("GEPAState[Any, Any]", event["state"])
        self._names = {number: self.version_of(each).version for number, each in enumerate(state.program_candidates)}
        means = [mean for mean in state.program_full_scores_val_set if mean > -math.inf]
        self._bridge.call(self._record(max(means, default=None), state.total_num_evals))

    async def _record(self, best: float | None, played: int) -> None:
        fresh, self._unrecorded = self._unrecorded, []
        for version in fresh:
            if version.state == "candidate":
                version.state = "dropped"
            await self._history.record(version)
        bill = self._chat.bill
        states = [version.state for version in fresh]
        figures: dict[str, object] = {"mean_reward": best, "metric_calls": played, "versions": len(states)}
        figures |= {state: states.count(state) for state in ("kept", "dropped", *WITHOUT_TEXT)}
        figures |= {"rollouts": self._player.rollouts, "calls": bill.calls, "tokens": bill.tokens, "cost": bill.cost}
        await self._log.step(self.iteration, figures)
        self._history.write(bill=bill.as_json())


def _unseen() -> RolloutResult:
    return RolloutResult(
        rollout_id="", task=None, status="succeeded", final_reward=None, failure=None, messages=[], spans=[]
    )
