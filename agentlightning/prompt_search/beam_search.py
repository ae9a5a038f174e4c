"""The beam search of APO: rounds of critiques and edits, selection on validation tasks, and the best version so far.

Sources: ProTeGi (Pryzant et al., EMNLP 2023, arXiv:2305.03495), algorithm 1, and TextGrad (arXiv:2406.07496) for the
critique and the edit; successive halving (Jamieson and Talwalkar, AISTATS 2016, arXiv:1502.07943, figure 1) for the
selection. Differences: the rollouts of a round run concurrently; scores are stored per prompt and task; the leader is
the version with the largest lower limit of its interval over all its validation tasks. If many versions are judged on a
few tasks, the apparent best is mostly due to chance ("On over-fitting in model selection", Cawley and Talbot, JMLR 11,
2010). Therefore, the best is chosen only from versions that ran on the full validation set: the leader of each round,
and at the end a few other members of beams.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentlightning.base.terminal import counted, cut
from agentlightning.chat.asking import all_of
from agentlightning.chat.bill import LimitReached
from agentlightning.chat.chat import ChatError
from agentlightning.prompt_search.candidates import check_version, same_text
from agentlightning.prompt_search.critic import Branch, Critic, current_branch
from agentlightning.prompt_search.history import WITHOUT_TEXT, PromptVersion
from agentlightning.prompt_search.results import NoCandidateError, RolloutResult
from agentlightning.prompt_search.search import SearchState
from agentlightning.training.tasks import batch_iter_over_dataset
from agentlightning.types import PromptTemplate

logger = logging.getLogger("agentlightning.algorithm.apo")

_CALLS_OF_VERSION = 2
"""Model calls per version: a critique and an edit."""
_RUNGS = (0.25, 0.5, 1.0)
"""Parts of a validation batch after which the worse half of the candidates is dropped."""
_FEWEST = 4
"""Minimum number of tasks in the first part."""
_Judged = tuple[PromptVersion, float | None, Sequence[RolloutResult]]
"""A version, its mean on tasks (None if too few have a reward), and its results."""


class BeamSteps(Protocol):
    """The settings and the override points of the algorithm; see `APO`."""

    gradient_batch_size: int
    val_batch_size: int
    beam_width: int
    branch_factor: int
    beam_rounds: int
    run_initial_validation: bool
    minimum_coverage: float
    halving: bool
    final_candidates: int
    seed: int

    @property
    def evaluate_prompt_on_batch(self) -> Callable[..., Awaitable[tuple[Sequence[RolloutResult], float | None]]]: ...

    @property
    def textual_gradient_and_apply_edit(self) -> Callable[..., Awaitable[str | None]]: ...


@dataclass
class BeamSearch:
    """One search, used only in the algorithm's event loop. `state` has its current results."""

    steps: BeamSteps
    state: SearchState
    critic: Critic
    best_score: float = field(default=-math.inf, init=False)
    _members: dict[str, PromptVersion] = field(default_factory=dict[str, PromptVersion], init=False)
    """Versions that were in a beam, by name."""
    _limited: set[str] = field(default_factory=set[str], init=False)
    """Names of versions that a limit stopped."""
    _texts: set[str] = field(default_factory=set[str], init=False)

    def __post_init__(self) -> None:
        self._texts.add(_text_of(self.state.seed))

    async def run(self) -> None:
        """Search until the end of the rounds, or until a limit or a failing critic ends the search."""
        steps, state, chat = self.steps, self.state, self.state.chat
        batches = batch_iter_over_dataset(state.train, steps.gradient_batch_size, random.Random(f"{steps.seed} train"))
        judging = batch_iter_over_dataset(state.val, steps.val_batch_size, random.Random(f"{steps.seed} val"))
        beam, reason, number = [state.seed], None, 0
        while reason is None and number <= steps.beam_rounds:
            try:
                if not state.history.has_recorded or chat.seconds_left() <= 0:  # recorded versions cost no call
                    chat.check_limits()
                if number:
                    beam, reason = await self._run_round(number, beam, batches, next(judging))
                elif steps.run_initial_validation:
                    await self._validate_seed()
            except LimitReached as error:
                reason = str(error)
            except NoCandidateError as error:
                reason = str(error)
                if chat.seconds_left() <= 0:  # nothing ran because there was no time
                    reason = f"The time limit is reached: {chat.limits.seconds}"
                elif self.best_score == -math.inf:
                    raise
            number += 1
        if chat.seconds_left() > 0:
            await self._validate_members(number - 1)
            state.write_history()
        state.stop_reason = reason or "finished"
        if reason is not None:
            logger.warning("search ends early, best version %s: %s", self.state.best.version, reason)

    async def _run_round(
        self, number: int, beam: list[PromptVersion], batches: Iterator[list[Any]], tasks: Sequence[Any]
    ) -> tuple[list[PromptVersion], str | None]:
        """Return the beam after a round, and a reason if no further round is possible."""
        began = time.monotonic()
        children, reason = await self._children(number, beam, batches)
        beam = await self._select(number, list({v.version: v for v in (*beam, *children)}.values()), tasks)
        self._members |= {version.version: version for version in beam}
        leader = leader_of(beam)
        if leader.digest in self.state.validated:
            logger.info("%s is the best version and is already validated", prefix_of(number, version=leader.version))
        else:
            await self._validate(number, [leader], "validation")
        await self._record_round(number, beam, len(children), time.monotonic() - began)
        return beam, reason

    async def _record_round(self, number: int, beam: Sequence[PromptVersion], children: int, seconds: float) -> None:
        versions = [version for version in self.state.history.versions if version.round == number]
        figures: dict[str, object] = {
            "mean_reward": None if self.best_score == -math.inf else self.best_score,
            "best": self.state.best.version,
            "beam": {version.version: version.score for version in beam},
            "versions": len(versions),
            "candidates": children,
        }
        await self.state.record_step(number, figures, versions, WITHOUT_TEXT, seconds=seconds)
        self.state.write_history()

    async def _children(
        self, number: int, beam: Sequence[PromptVersion], batches: Iterator[list[Any]]
    ) -> tuple[list[PromptVersion], str | None]:
        """Return the new versions of a round, and a reason if no more can be created."""
        history, names = self.state.history, list(self.state.seed.templates)
        target = names[(number - 1) % len(names)]  # the templates are edited in turns
        parents, factor = self._parents(number, beam), self.steps.branch_factor
        places = [(b, i) for b in range(len(parents)) for i in range(factor)]
        planned = [
            PromptVersion(name, dict(parents[b].templates), target, number, parents[b].version)
            for name, (b, _) in zip(history.next_names(len(places)), places, strict=True)
        ]
        tasks = [next(batches) for _ in places]
        recorded = await history.recorded(planned)
        slots = asyncio.Semaphore(self._versions_at_once())
        await all_of(
            *(
                self._make(version, parents[b], batch, (b + 1, i + 1), slots)
                for version, (b, i), batch, old in zip(planned, places, tasks, recorded, strict=True)
                if old is None
            )
        )
        versions = [old or version for version, old in zip(planned, recorded, strict=True)]
        history.versions.extend(versions)
        for version in versions:
            if version.state not in WITHOUT_TEXT:
                text = _text_of(version)
                version.state = "duplicate" if text in self._texts else "candidate"
                self._texts.add(text)
        return [version for version in versions if version.state == "candidate"], self._why_no_more(versions)

    def _why_no_more(self, versions: Sequence[PromptVersion]) -> str | None:
        failed = [version for version in versions if version.state in ("failed", "refused")]
        reason = next((each.problems[0] for each in failed if each.version in self._limited), None)
        if reason is None and len(failed) == len(versions):
            reason = f"critic and editor returned no version: {failed[0].problems[0]}"
            no_answer = all(version.state == "failed" for version in failed)
            if no_answer and len(self.state.history.versions) == len(versions) + 1:  # nothing was ever made
                raise ChatError(f"The search cannot start: {reason}")
        return reason

    def _versions_at_once(self) -> int:
        """Return the maximum number of versions between critique and edit, so that a limit covers complete versions."""
        chat, critic = self.state.chat, self.critic
        calls = chat.calls_left(critic.gradient_model, critic.apply_edit_model) // _CALLS_OF_VERSION
        return int(max(1, min(chat.concurrency, calls)))

    def _parents(self, number: int, beam: Sequence[PromptVersion]) -> list[PromptVersion]:
        width = self.steps.beam_width
        if len(beam) < width:
            logger.warning(
                "%s prompts in the beam: %d; expansions: %d. Some prompts are expanded more than once",
                *(prefix_of(number), len(beam), width),
            )
            return [beam[place % len(beam)] for place in range(width)]
        return random.Random(f"{self.steps.seed} parents {number}").sample(list(beam), width)

    async def _make(
        self,
        version: PromptVersion,
        parent: PromptVersion,
        tasks: Sequence[Any],
        place: tuple[int, int],
        slots: asyncio.Semaphore,
    ) -> None:
        """Run the parent, call critic and editor, check the text, and record the version in any case."""
        prefix = prefix_of(version.round, *place, parent.version)
        branch = Branch(random.Random(f"{self.steps.seed} {version.version}"), prefix)
        view = dataclasses.replace(parent, target=version.target)
        results, _ = await self.steps.evaluate_prompt_on_batch(view, version.target, tasks, "train", prefix=prefix)
        token = current_branch.set(branch)
        try:
            async with slots:
                text = await self.steps.textual_gradient_and_apply_edit(view, results, prefix=prefix) or ""
                template, problems = await self._checked(text, version.target, branch)
            if template is None:
                version.state, version.problems = "refused" if text.strip() else "failed", problems
                logger.error("%s no version: %s", prefix, " ".join(problems))
            else:
                version.templates[version.target] = template
                shown = prefix_of(version.round, *place, version.version)
                logger.info("%s new prompt: %r", shown, cut(template.template, 50))
                logger.info("%s full text:\n%s", shown, template.template)
        except (ChatError, LimitReached) as error:
            version.state, version.problems = "failed", (str(error),)
            if isinstance(error, LimitReached):
                self._limited.add(version.version)
            else:
                logger.error("%s no version: %s", prefix, error)
        finally:
            current_branch.reset(token)
        version.critique, version.bill = branch.critique, branch.bill
        await self.state.history.record(version)

    async def _checked(self, text: str, target: str, branch: Branch) -> tuple[PromptTemplate | None, tuple[str, ...]]:
        seed = self.state.seed.templates[target]
        checked = check_version(text, seed)
        if checked.template is None and text.strip():
            logger.warning("%s invalid text, editor tries once more: %s", branch.prefix, " ".join(checked.problems))
            checked = check_version(await self.critic.repair(text, checked.problems, seed, branch), seed)
        return checked

    async def _select(
        self, number: int, candidates: Sequence[PromptVersion], tasks: Sequence[Any]
    ) -> list[PromptVersion]:
        """Return the new beam, best first. After each part of the batch, the worse half of the candidates is dropped.

        Raises:
            NoCandidateError: No version has enough scored rollouts.
        """
        steps, remaining = self.steps, list(candidates)
        ends = sorted({max(min(_FEWEST, len(tasks)), math.ceil(len(tasks) * part)) for part in _RUNGS})
        ends = ends if steps.halving and len(remaining) > steps.beam_width else [len(tasks)]
        ranked, failures = list[tuple[float, PromptVersion]](), list[str]()
        for end in ends:
            judged = await all_of(*(self._judge(number, version, tasks[:end]) for version in remaining))
            failures += [why for _, _, results in judged for r in results if (why := r["failure"])]
            ranked = [(mean, version) for version, mean, _ in judged if mean is not None]
            ranked.sort(key=lambda each: (-each[0], each[1].failures / max(1, each[1].tasks), each[1].number))
            if end < len(tasks):  # the better half, at least a beam of them, and those equal to the last of them
                count = max(steps.beam_width, math.ceil(len(ranked) / 2))
                ranked = [each for i, each in enumerate(ranked) if i < count or each[0] == ranked[count - 1][0]]
                remaining = [version for _, version in ranked]
        beam = [version for _, version in ranked[: steps.beam_width]]
        for version in candidates:
            version.state = "kept" if version in beam else "dropped"
        scores = ", ".join(f"{v.version}:{_score_text(v.score)}" for v in candidates)
        logger.info("%s candidates: %s", prefix_of(number), scores)
        logger.info("%s top: %s", prefix_of(number), ", ".join(f"{v.version}:{mean:.3f}" for mean, v in ranked))
        if not beam:
            first = f". First failure: {failures[0]}" if failures else ""
            raise NoCandidateError(
                f"No beam candidates left: none of {counted(len(candidates), 'version')} has a reward on at least "
                f"{steps.minimum_coverage:.0%} of {counted(len(tasks), 'validation task')}{first}"
            )
        return beam

    async def _judge(self, number: int, version: PromptVersion, tasks: Sequence[Any]) -> _Judged:
        state, prefix = self.state, prefix_of(number, version=version.version)
        results, mean = await self.steps.evaluate_prompt_on_batch(version, version.target, tasks, "val", prefix=prefix)
        version.judge(state.score(state.evaluator.known(version.templates, "val") or results))
        score = state.score(results)
        if not state.is_enough(score):
            logger.warning("%s tasks with a reward: only %d of %d", prefix, score.scored, score.tasks)
            mean = None
        return version, mean, results

    async def _validate_seed(self) -> None:
        seed = self.state.seed
        [(_, _, results)] = await self._validate(0, [seed], "validation")
        if seed.failures == seed.tasks:
            raise NoCandidateError(
                f"The seed has no reward on any of {counted(seed.tasks, 'validation task')}. First failure: "
                f"{next(filter(None, (result['failure'] for result in results)), 'no reward')}"
            )

    async def _validate_members(self, number: int) -> None:
        """Run additional members of beams on the full validation set concurrently, before the final choice."""
        members = [version for version in self._members.values() if version.digest not in self.state.validated]
        members.sort(key=_lower_bound, reverse=True)
        before = self.state.best
        if versions := members[: self.steps.final_candidates]:
            await self._validate(number, versions, "validation of {version}")
        if self.state.best is not before:
            await self.state.log.best("validation", self.best_score, number)

    async def _validate(self, number: int, versions: Sequence[PromptVersion], name: str) -> list[_Judged]:
        """Judge versions on the full validation set. A version becomes the best if it is strictly better.

        `name` is the name of their records. A round has one record with each name.
        """
        judged = await all_of(*(self._judge(number, version, self.state.val) for version in versions))
        for version, mean, results in judged:
            if mean is not None and mean > self.best_score:
                prefix = prefix_of(number, version=version.version)
                logger.info("%s best updated: %s -> %.3f", prefix, _score_text(self.best_score), mean)
                self.state.best, self.best_score = version, mean
            of_version, ids = name.format(version=version.version), [result["rollout_id"] for result in results]
            await self.state.record_validation(
                number, of_version, version, results, mean, counts_for_best=name == "validation", rollout_ids=ids
            )
        for version, mean, _ in judged:
            if version is not self.state.best:
                logger.warning(
                    "%s best unchanged: %s with %s, ahead of %s",
                    prefix_of(number, version=version.version),
                    *(self.state.best.version, _score_text(self.best_score), _score_text(mean)),
                )
        return judged


def leader_of(beam: Sequence[PromptVersion]) -> PromptVersion:
    """Return the version with the largest lower limit of the mean."""
    return max(beam, key=_lower_bound)


def _lower_bound(version: PromptVersion) -> float:
    return -math.inf if version.interval is None else version.interval[0]


def _text_of(version: PromptVersion) -> str:
    return "\0".join(same_text(template) for _, template in sorted(version.templates.items()))


def _score_text(score: float | None) -> str:
    return "-" if score is None or score == -math.inf else f"{score:.3f}"


def prefix_of(
    round: int | None = None, beam: int | None = None, branch: int | None = None, version: str | None = None
) -> str:
    """Return the beginning of a log line, such as `[Round 01 | Beam 02 | Branch 01 | Prompt v3]`."""
    numbers = (("Round", round), ("Beam", beam), ("Branch", branch))
    parts = [f"{name} {number:02d}" for name, number in numbers if number is not None]
    return f"[{' | '.join([*parts, *([f'Prompt {version}'] if version else [])])}]"
