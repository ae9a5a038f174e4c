"""The search of GEPA with the package `gepa`: adapter and callback on rollouts of the store and records of the run.

The package runs in its own thread. All access to the store is in the event loop of the algorithm.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from gepa import api
from gepa.core.adapter import EvaluationBatch
from gepa.core.callbacks import IterationEndEvent, IterationStartEvent, MergeAttemptedEvent
from gepa.core.state import GEPAState
from gepa.proposer.base import CandidateProposal
from gepa.strategies.acceptance import AcceptanceCriterion, ImprovementOrEqualAcceptance, StrictImprovementAcceptance
from typing_extensions import override

from agentlightning.chat.bill import LimitReached
from agentlightning.errors import BadRequestError
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.prompt_search.evaluator import Templates, digest_of
from agentlightning.prompt_search.gepa_reflection import Candidate, LoopBridge, Record, Reflector, templates_of
from agentlightning.prompt_search.history import WITHOUT_TEXT, PromptVersion
from agentlightning.prompt_search.results import NoCandidateError, RolloutResult, score_of
from agentlightning.prompt_search.search import SearchState
from agentlightning.types import RolloutMode

logger = logging.getLogger("agentlightning.algorithm.gepa")
Batch = EvaluationBatch[RolloutResult, RolloutResult]

_MOST_FAILURES = 3
"""Number of consecutive failed model calls, each after its retries, that ends the search."""
_MOST_IDLE = 50
"""Number of consecutive iterations without a rollout that ends the search."""
_STATE = "gepa_state.bin"
_REWARDS, _TASKS = "agentlightning_rewards", "agentlightning_validation"
"""Keys in the adapter's part of the package's state: rewards of the validation tasks by candidate digest, and digest of
the ordered validation tasks, which the package identifies only by number."""


@dataclass(frozen=True, slots=True)
class Task:
    """An item of a data set, with the mode of its rollouts."""

    mode: RolloutMode
    input: Any


class GEPASearch:
    """One search: adapter, callback, stopper and logger of the package.

    A task without a reward gets slightly less than the mean of the candidate's other tasks. It does not change the
    mean, and a minibatch with an error never counts as perfect. A candidate with rewards on too few tasks is never the
    best.

    Args:
        records: Returns the records of results for the model, see `GEPA.make_reflective_dataset`.
        prompts, fields: See `Reflector`.
        settings: Arguments of `gepa.optimize`.
    """

    propose_new_texts = None

    def __init__(
        self,
        state: SearchState,
        records: Callable[[Templates, Sequence[RolloutResult], str], Sequence[Record]],
        *,
        prompts: str | Mapping[str, str] | None,
        fields: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        self._state, self._records, self._settings, self._seed = state, records, settings, state.seed
        self._perfect: float | None = settings["perfect_score"] if settings["skip_perfect_score"] else None
        self._bridge = LoopBridge()
        self._reflector = Reflector(state.chat, self._bridge, self._seed.templates, prompts, fields, self._add_proposal)
        self.failures = self._reflector.failures
        self._versions = {self._seed.digest: self._seed}
        self._names: dict[int, str] = {}
        """Names of versions by the candidate numbers of the package."""
        self._unrecorded: list[PromptVersion] = []
        self._known_seed_scores: Mapping[int, float] | None = None
        self._iteration = self._idle_since = 0
        self._rollouts = -1
        self._stopped_by: str | None = None

    async def resume(self, run_dir: Path | None) -> None:
        """Restore the versions of earlier starts, from the records of the run and from a folder."""
        saved = None if run_dir is None else await asyncio.to_thread(read_saved, run_dir, self._state)
        recorded = await self._state.history.resume(discard=saved is None)
        self._state.history.versions.extend(recorded)
        self._versions |= {v.digest: v for v in recorded if v.state not in WITHOUT_TEXT}
        if saved is None:
            return
        self._known_seed_scores = saved.prog_candidate_val_subscores[0]
        rewards_by_digest = saved.adapter_state.get(_REWARDS, {})
        pairs = zip(saved.program_candidates, saved.parent_program_for_candidate, strict=True)
        for place, (candidate, parents) in enumerate(pairs):
            version = self._version_of(candidate)
            names = [self._names[parent] for parent in parents if parent is not None]
            version.parent = version.parent or " + ".join(names) or None
            self._names[place] = version.version
            if (rewards := rewards_by_digest.get(version.digest)) is not None:
                version.state = "kept"
                version.judge(score_of(rewards, self._state.missing))
                self._state.validated[version.digest] = list(rewards)
        self._unrecorded = []

    async def run(self) -> None:
        """Run the package in a thread until it ends.

        Raises:
            Exception: An error that the package logged but did not raise.
        """
        state = self._state
        optimize = cast(Any, api.optimize)  # pyright: ignore[reportUnknownMemberType] -- its type parameters are not known
        work = asyncio.to_thread(
            optimize,
            seed_candidate={name: template.template for name, template in self._seed.templates.items()},
            trainset=[Task("train", task) for task in state.train],
            valset=[Task("val", task) for task in state.val],
            adapter=self,
            reflection_strategy=self._reflector,
            logger=self,
            track_best_outputs=False,
            **{
                **self._settings,
                "stop_callbacks": [*self._settings["stop_callbacks"], self.should_stop],
                "callbacks": [*self._settings["callbacks"], self],
            },
        )
        thread = asyncio.create_task(work, name="gepa")
        try:
            await asyncio.shield(thread)
        except LimitReached as reached:
            state.stop_reason = str(reached)
        except BaseException:
            self._bridge.close()
            await asyncio.wait([thread])  # its next call ends it
            if not thread.cancelled():
                thread.exception()  # retrieved, so that asyncio does not log it: it is the error raised here
            raise
        else:
            if (error := self._reflector.error) is not None and not isinstance(error, LimitReached):
                raise error
            state.stop_reason = self._stopped_by or "finished"
        finally:
            state.best = best = self._best()
        if best is not state.seed and best.score is not None:
            await state.log.best("validation", best.score, best.round)

    def _best(self) -> PromptVersion:
        """Return the version with the largest mean on all validation tasks, or the seed if no version is better.

        Excludes versions with rewards on too few tasks, and versions that did not run on all tasks.
        """
        state, whole = self._state, list[PromptVersion]()
        for each in state.history.versions:
            covered = each.tasks - each.failures >= state.minimum_coverage * each.tasks
            if each.state == "kept" and each.score is not None and each.tasks >= len(state.val) and covered:
                whole.append(each)
        best = max(whole, key=lambda each: each.score or 0.0, default=state.seed)
        return state.seed if best.score == state.seed.score else best

    def should_stop(self, gepa_state: GEPAState[Any, Any]) -> bool:
        """Return whether the search must end: a limit is reached, model calls fail, or nothing new is proposed."""
        error = self._reflector.error
        try:
            self._state.chat.check_limits()
        except LimitReached as reached:
            if error is None or isinstance(error, LimitReached):
                error = reached
        if self._state.evaluator.rollouts != self._rollouts:
            self._rollouts, self._idle_since = self._state.evaluator.rollouts, gepa_state.i
        if error is not None:
            self._stopped_by = str(error)
        elif len(self.failures) >= _MOST_FAILURES:
            self._stopped_by = f"{len(self.failures)} consecutive model calls failed: {self.failures[-1]}"
        elif gepa_state.i - self._idle_since >= _MOST_IDLE:
            self._stopped_by = f"no new version in {_MOST_IDLE} iterations"
        best = max(gepa_state.program_full_scores_val_set, default=-math.inf)
        return self._stopped_by is not None or (self._perfect is not None and best >= self._perfect)

    def _version_of(self, candidate: Candidate) -> PromptVersion:
        """Return the version of a candidate, or create one if it is unknown."""
        templates = templates_of(candidate, self._seed.templates)
        version = self._versions.get(digest_of(templates))
        if version is None:
            changed = [name for name, t in templates.items() if t != self._seed.templates[name]]
            version = self._add(PromptVersion("", templates, changed[0] if changed else self._seed.target))
        return version

    def _add(self, version: PromptVersion) -> PromptVersion:
        version.version, version.round = self._state.history.next_names(1)[0], self._iteration
        self._state.history.versions.append(version)
        self._unrecorded.append(version)
        if version.state not in WITHOUT_TEXT:
            self._versions[version.digest] = version
        return version

    def _add_proposal(self, version: PromptVersion, parent: Candidate) -> None:
        version.parent = self._version_of(parent).version
        if version.state == "candidate" and version.digest in self._versions:
            version.state = "duplicate"
        self._add(version)

    def get_adapter_state(self) -> dict[str, Any]:
        """Return the adapter's state, which the package saves with its own."""
        rewards = {digest: list(rewards) for digest, rewards in self._state.validated.items()}
        return {_REWARDS: rewards, _TASKS: _digest_of_tasks(self._state.val)}

    def evaluate(self, batch: list[Task], candidate: Candidate, capture_traces: bool = False) -> Batch:
        """Run one candidate; see `batch_evaluate`."""
        if self._known_seed_scores is not None and self._version_of(candidate) is self._seed:
            scores, self._known_seed_scores = self._known_seed_scores, None
            if all(place in scores for place in range(len(batch))):
                return EvaluationBatch([_UNSEEN] * len(batch), [scores[place] for place in range(len(batch))])
        return self.batch_evaluate([(candidate, batch)])[0]

    def batch_evaluate(self, items: list[tuple[Candidate, list[Task]]]) -> list[Batch]:
        """Run all candidates in one round, and return scores, results, and results as trajectories.

        Raises:
            LimitReached: The time limit was reached.
        """

        async def run_all() -> list[list[RolloutResult]]:
            return await asyncio.gather(*(self._run_candidate(candidate, batch) for candidate, batch in items))

        return [EvaluationBatch(results, self._scores(results), results) for results in self._bridge.call(run_all())]

    def make_reflective_dataset(
        self, candidate: Candidate, eval_batch: Batch, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Record]]:
        """Return the records for the model, by component."""
        templates = templates_of(candidate, self._seed.templates)
        try:
            shown = eval_batch.trajectories or []
            return {name: list(self._records(templates, shown, name)) for name in components_to_update}
        except Exception as error:  # a user's override: it ends the search, see `should_stop`
            self._reflector.error = error
            raise

    async def _run_candidate(self, candidate: Candidate, batch: Sequence[Task]) -> list[RolloutResult]:
        if not batch:
            return []
        version, mode, chat = self._version_of(candidate), batch[0].mode, self._state.chat
        tasks = [task.input for task in batch]
        results = await self._state.evaluator.evaluate(version.version, version.templates, tasks, mode)
        if chat.seconds_left() <= 0 and any(result["final_reward"] is None for result in results):
            chat.check_limits()  # interrupted by the limit, which is no result of the candidate
        if mode == "val":
            await self._judge(version, results)
        return results

    async def _judge(self, version: PromptVersion, results: Sequence[RolloutResult]) -> None:
        state, score = self._state, self._state.score(results)
        is_seed = version is self._seed
        if is_seed and not score.scored:
            failures = ", ".join(sorted({str(result["failure"]) for result in results}))
            raise NoCandidateError(f"The seed has no reward on any validation task (of {len(results)}): {failures}")
        if len(results) < len(state.val):  # the package tries a merged candidate on a few of them
            if version.digest not in state.validated:
                version.judge(score)
            return
        version.judge(score)
        version.state = "kept" if is_seed or score.coverage >= state.minimum_coverage else "dropped"
        name = "validation" if is_seed else f"validation of {version.version}"
        value = score.mean if version.state == "kept" else None  # too few of the tasks have a reward
        await state.record_validation(self._iteration, name, version, results, value)

    def _scores(self, results: Sequence[RolloutResult]) -> list[float]:
        score = self._state.score(results)
        if score.mean is None or not self._state.is_enough(score):
            return [-math.inf] * len(results)
        neutral = math.nextafter(score.mean, -math.inf)
        return [neutral if (reward := result["final_reward"]) is None else reward for result in results]

    def log(self, message: str) -> None:
        logger.info("%s", message)

    def on_iteration_start(self, event: IterationStartEvent) -> None:
        """Set the iteration number for new versions."""
        self._iteration = event["iteration"]

    def on_merge_attempted(self, event: MergeAttemptedEvent) -> None:
        """Record the parents of a merged version."""
        version, parents = self._version_of(event["merged_candidate"]), event["parent_ids"]
        if version is not self._seed and version.parent is None:  # not one that already existed
            version.parent = " + ".join(self._names[each] for each in parents if each in self._names) or None

    def on_iteration_end(self, event: IterationEndEvent) -> None:
        """Record the versions and the metrics of an iteration."""
        gepa_state = cast("GEPAState[Any, Any]", event["state"])
        candidates = gepa_state.program_candidates
        self._names = {place: self._version_of(each).version for place, each in enumerate(candidates)}
        means = [mean for mean in gepa_state.program_full_scores_val_set if mean > -math.inf]
        self._bridge.call(self._record(max(means, default=None), gepa_state.total_num_evals))

    async def _record(self, best: float | None, metric_calls: int) -> None:
        versions, self._unrecorded = self._unrecorded, []
        for version in versions:
            if version.state == "candidate":
                version.state = "dropped"
            await self._state.history.record(version)
        figures = {"mean_reward": best, "metric_calls": metric_calls, "versions": len(versions)}
        await self._state.record_step(self._iteration, figures, versions, ("kept", "dropped", *WITHOUT_TEXT))
        self._state.history.write(bill=self._state.chat.bill.as_json())


_UNSEEN = RolloutResult(
    rollout_id="", task=None, status="succeeded", final_reward=None, failure=None, messages=[], spans=[]
)


class PairedAcceptance:
    """Criterion that judges a proposal by the minibatch tasks for which the proposal and its parent have scores.

    Raises:
        BadRequestError: The criterion is neither a known name nor an object of the package.
    """

    _CRITERIA: Mapping[str, Callable[[], AcceptanceCriterion]] = {
        "strict_improvement": StrictImprovementAcceptance,
        "improvement_or_equal": ImprovementOrEqualAcceptance,
    }

    def __init__(self, criterion: str | AcceptanceCriterion) -> None:
        if isinstance(criterion, str) and criterion not in self._CRITERIA:
            raise BadRequestError(
                f"acceptance_criterion must be one of {', '.join(self._CRITERIA)}, or an object with "
                f"should_accept(proposal, state); got {criterion!r}"
            )
        self._criterion: Any = self._CRITERIA[criterion]() if isinstance(criterion, str) else criterion

    def should_accept(self, proposal: CandidateProposal[Any], state: GEPAState[Any, Any]) -> bool:
        """Return whether the proposal runs on the validation tasks."""
        before, after = proposal.eval_before, proposal.eval_after
        if before is None or after is None or len(before.outputs) != len(after.outputs):
            return self._criterion.should_accept(proposal, state)
        both = [
            place
            for place, (old, new) in enumerate(zip(before.outputs, after.outputs, strict=True))
            if old["final_reward"] is not None and new["final_reward"] is not None
        ]
        paired = dataclasses.replace(
            proposal,
            subsample_scores_before=[before.scores[place] for place in both],
            subsample_scores_after=[after.scores[place] for place in both],
        )
        return bool(both) and self._criterion.should_accept(paired, state)


class _DataOnly(pickle.Unpickler):
    """Unpickler for the data that the package writes (lists, strings, numbers). It calls nothing."""

    @override
    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(
            f"it refers to {module_name}.{global_name}; only data is loaded, because anything else could run code"
        )


def _digest_of_tasks(tasks: Sequence[Any]) -> str:
    return hashlib.sha256("\n".join(tasks_of(tasks)).encode()).hexdigest()[:32]


def read_saved(run_dir: Path, state: SearchState) -> Any:
    """Return the `GEPAState` in a folder; None without one.

    Raises:
        BadRequestError: The state cannot be read, contains more than data, or has different seed prompts or
            validation tasks.
    """
    if not (run_dir / _STATE).exists():
        return None
    try:
        with (run_dir / _STATE).open("rb") as file:
            _DataOnly(file).load()  # before the package itself reads it, which would call the functions that it names
        saved = cast(Any, GEPAState).load(str(run_dir))
    except Exception as error:  # a damaged pickle can raise any error
        raise BadRequestError(f"Cannot read {run_dir / _STATE} ({error}). Delete it, or use another run_dir") from error
    if saved.program_candidates[0] != {name: template.template for name, template in state.seed.templates.items()}:
        raise BadRequestError(
            f"run_dir={str(run_dir)!r} contains a search that began with other prompts. Use the same "
            "initial_resources, or another run_dir"
        )
    digest = _digest_of_tasks(state.val)
    if saved.adapter_state.get(_TASKS, digest) != digest:
        raise BadRequestError(
            f"run_dir={str(run_dir)!r} contains a search with other validation tasks, or with the tasks in another "
            "order. Use the same val_dataset, or another run_dir"
        )
    return saved
