"""The beam search over versions of prompts: rounds of critiques and edits, choice on validation tasks, the best so far.

Sources: ProTeGi (Pryzant et al., EMNLP 2023, arXiv:2305.03495), algorithm 1, and TextGrad (arXiv:2406.07496) for the
critique and the edit; successive halving (Jamieson and Talwalkar, AISTATS 2016, arXiv:1502.07943, figure 1) for the
choice. What we changed: a round is played at once; scores are kept per prompt and task; the leader is the one with the
greatest lower bound of its interval over all validation tasks that it has played, and only a new leader is played on
the whole validation set.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentlightning.algorithm.apo.critic import Branch, Critic, present
from agentlightning.algorithm.prompts.candidates import check_version, same_text
from agentlightning.algorithm.prompts.cases import RolloutResult
from agentlightning.algorithm.prompts.history import WITHOUT_TEXT, History, PromptVersion
from agentlightning.algorithm.prompts.playing import PromptPlayer
from agentlightning.algorithm.prompts.scores import MissingPolicy, NoCandidateError, score_of, sign_test
from agentlightning.algorithm.runs.compare import tasks_of
from agentlightning.algorithm.runs.log import RunLog
from agentlightning.algorithm.utils import batch_iter_over_dataset
from agentlightning.chat.bill import LimitReached
from agentlightning.chat.chat import ChatError
from agentlightning.terminal import cut
from agentlightning.types import PromptTemplate, RolloutMode

logger = logging.getLogger("agentlightning.algorithm.apo")

_RUNGS = (0.25, 0.5, 1.0)
"""Parts of a validation batch after which the worse half of the candidates is left out."""
_FEWEST = 4
"""Tasks of the first part."""


def prefix_of(
    round: int | None = None, beam: int | None = None, branch: int | None = None, version: str | None = None
) -> str:
    """Return the beginning of a log line, such as `[Round 01 | Beam 02 | Branch 01 | Prompt v3]`."""
    numbers = (("Round", round), ("Beam", beam), ("Branch", branch))
    parts = [f"{name} {number:02d}" for name, number in numbers if number is not None]
    return f"[{' | '.join([*parts, *([f'Prompt {version}'] if version else [])])}]"


class Steps(Protocol):
    """The override points of the algorithm, as the search calls them."""

    async def evaluate_prompt_on_batch(
        self,
        prompt: PromptVersion,
        resource_name: str,
        dataset: Sequence[Any],
        mode: RolloutMode,
        *,
        prefix: str | None = None,
    ) -> tuple[Sequence[RolloutResult], float | None]: ...

    async def textual_gradient_and_apply_edit(
        self, prompt: PromptVersion, results: Sequence[RolloutResult], *, prefix: str | None = None
    ) -> str | None: ...


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """What a search is told; see `APO`."""

    gradient_batch_size: int
    val_batch_size: int
    beam_width: int
    branch_factor: int
    beam_rounds: int
    run_initial_validation: bool
    missing: MissingPolicy
    minimum_coverage: float
    halving: bool
    seed: int


@dataclass
class BeamSearch:
    """One search. Belongs to the algorithm's loop; `best` and `history` hold what is known at any time."""

    steps: Steps
    settings: SearchSettings
    player: PromptPlayer
    critic: Critic
    history: History
    log: RunLog
    seed: PromptVersion
    names: Sequence[str]
    """Of the templates, each edited in its turn."""
    train: Sequence[Any]
    val: Sequence[Any]
    best: PromptVersion = field(init=False)
    best_score: float = field(default=-math.inf, init=False)
    p_value: float | None = field(default=None, init=False)
    stop_reason: str = field(default="interrupted", init=False)
    """`interrupted` until the search has ended by itself."""
    _whole: dict[str, list[RolloutResult]] = field(default_factory=dict[str, list[RolloutResult]], init=False)
    """Results on the whole validation set, by version."""
    _over: set[str] = field(default_factory=set[str], init=False)
    """Versions that a limit stopped."""
    _texts: set[str] = field(default_factory=set[str], init=False)

    def __post_init__(self) -> None:
        self.best = self.seed
        self._texts = {self._text_of(self.seed)}

    async def run(self) -> None:
        """Search to the end of the rounds, or until a limit or the critic ends it."""
        settings = self.settings
        batches = batch_iter_over_dataset(
            self.train, settings.gradient_batch_size, random.Random(f"{settings.seed} train")
        )
        judging = batch_iter_over_dataset(self.val, settings.val_batch_size, random.Random(f"{settings.seed} val"))
        beam, reason, number = [self.seed], None, 0
        while reason is None and number <= settings.beam_rounds:
            try:
                if not self.history.goes_on or self.critic.chat.seconds_left() <= 0:  # what is there costs no call
                    self.critic.chat.check_limits()
                if number:
                    beam, reason = await self._round(number, beam, batches, next(judging))
                elif settings.run_initial_validation:
                    await self._validate_seed()
            except LimitReached as error:
                reason = str(error)
            except NoCandidateError as error:
                reason = str(error)
                if self.critic.chat.seconds_left() <= 0:  # nothing was played because there was no time
                    reason = f"The limit on seconds is reached: {self.critic.chat.limits.seconds}"
                elif self.best_score == -math.inf:
                    raise
            number += 1
        self.stop_reason = reason or "finished"
        if reason is not None:
            logger.warning("The search ends early with %s as the best: %s", self.best.version, reason)

    async def _round(
        self, number: int, beam: list[PromptVersion], batches: Iterator[list[Any]], tasks: Sequence[Any]
    ) -> tuple[list[PromptVersion], str | None]:
        """Return the beam after a round, and why there can be no further one if so."""
        began = time.monotonic()
        children, reason = await self._children(number, beam, batches)
        candidates = list({version.version: version for version in (*beam, *children)}.values())
        beam = await self._choose(number, candidates, tasks)
        await self._lead(number, beam)
        await self._record_round(number, beam, children, time.monotonic() - began)
        return beam, reason

    # --- children ------------------------------------------------------------------------------------------------

    async def _children(
        self, number: int, beam: Sequence[PromptVersion], batches: Iterator[list[Any]]
    ) -> tuple[list[PromptVersion], str | None]:
        """Return the new versions of a round, and why no more can be made if so."""
        settings, target = self.settings, self.names[(number - 1) % len(self.names)]
        parents = self._parents(number, beam)
        places = [(b, i) for b in range(len(parents)) for i in range(settings.branch_factor)]
        names = self.history.next_names(len(places))
        wanted = [
            PromptVersion(name, dict(parents[b].templates), target, number, parents[b].version)
            for name, (b, _) in zip(names, places, strict=True)
        ]
        tasks = [next(batches) for _ in places]
        known = await self.history.recorded(wanted)
        makings = [
            self._make(version, parents[b], batch, (b + 1, i + 1))
            for version, (b, i), batch, old in zip(wanted, places, tasks, known, strict=True)
            if old is None
        ]
        made = iter(await _all(makings))
        versions = [next(made) if old is None else old for old in known]
        self.history.add(versions)
        for version in versions:
            if version.state not in WITHOUT_TEXT:
                version.state = "candidate"
                if (text := self._text_of(version)) in self._texts:
                    version.state = "duplicate"
                self._texts.add(text)
        failed = [version for version in versions if version.state == "failed"]
        reason = next((each.problems[0] for each in failed if each.version in self._over), None)
        if reason is None and len(failed) == len(versions):
            reason = f"critic and editor gave no version: {failed[0].problems[0]}"
            if len(self.history.versions) == len(versions) + 1:  # nothing was ever made
                raise ChatError(f"The search cannot begin: {reason}")
        return [version for version in versions if version.state == "candidate"], reason

    def _parents(self, number: int, beam: Sequence[PromptVersion]) -> list[PromptVersion]:
        width = self.settings.beam_width
        if len(beam) < width:
            logger.warning(
                "%s the beam holds %d prompts and %d are expanded: some are expanded more than once",
                *(prefix_of(number), len(beam), width),
            )
            return [beam[place % len(beam)] for place in range(width)]
        return random.Random(f"{self.settings.seed} parents {number}").sample(list(beam), width)

    async def _make(
        self, version: PromptVersion, parent: PromptVersion, tasks: Sequence[Any], place: tuple[int, int]
    ) -> PromptVersion:
        """Play the parent, ask critic and editor, check the text, and write the version down, however it ends."""
        prefix = prefix_of(version.round, *place, parent.version)
        branch = Branch(random.Random(f"{self.settings.seed} {version.version}"), prefix)
        view = dataclasses.replace(parent, target=version.target)
        results, _ = await self.steps.evaluate_prompt_on_batch(view, version.target, tasks, "train", prefix=prefix)
        token = present.set(branch)
        try:
            text = await self.steps.textual_gradient_and_apply_edit(view, results, prefix=prefix)
            template, problems = await self._checked(text or "", view.prompt_template, version.target, branch)
            if template is None:
                version.state = "failed" if not (text or "").strip() else "refused"
                version.problems = problems
                logger.error("%s no version came of it: %s", prefix, " ".join(problems))
            else:
                version.templates[version.target] = template
                shown = prefix_of(version.round, *place, version.version)
                logger.info("%s new prompt: %s", shown, _preview(template))
                logger.info("%s full text:\n%s", shown, template.template)
        except ChatError as error:
            version.state, version.problems = "failed", (str(error),)
            logger.error("%s no version came of it: %s", prefix, error)
        except LimitReached as error:
            version.state, version.problems = "failed", (str(error),)
            self._over.add(version.version)
        finally:
            present.reset(token)
        version.critique, version.bill = branch.critique, branch.bill
        if version.state != "failed":  # a run that goes on asks again
            await self.history.record(version)
        return version

    async def _checked(
        self, text: str, parent: PromptTemplate, target: str, branch: Branch
    ) -> tuple[PromptTemplate | None, tuple[str, ...]]:
        seed = self.seed.templates[target]
        checked = check_version(text, seed)
        if checked.template is None and text.strip():
            logger.warning("%s the text is sent back once: %s", branch.prefix, " ".join(checked.problems))
            checked = check_version(await self.critic.repair(text, checked.problems, seed, branch), seed)
        return checked.template, checked.problems

    def _text_of(self, version: PromptVersion) -> str:
        return "\0".join(same_text(version.templates[name]) for name in self.names)

    # --- choice --------------------------------------------------------------------------------------------------

    async def _choose(
        self, number: int, candidates: Sequence[PromptVersion], tasks: Sequence[Any]
    ) -> list[PromptVersion]:
        """Return the new beam, the best first: each candidate on parts of the batch, the worse half left out each time.

        Raises:
            NoCandidateError: no version has enough scored rollouts, and none ever had.
        """
        settings, left = self.settings, list(candidates)
        ends = sorted({max(min(_FEWEST, len(tasks)), math.ceil(len(tasks) * part)) for part in _RUNGS})
        ends = ends if settings.halving and len(left) > settings.beam_width else [len(tasks)]
        ranked, failures = list[tuple[float, PromptVersion]](), list[str]()
        for end in ends:
            found = await _all([self._judge(number, version, tasks[:end]) for version in left])
            failures += [why for _, _, results in found for r in results if (why := r["failure"])]
            ranked = [(mean, version) for version, mean, _ in found if mean is not None]
            ranked.sort(key=lambda each: (-each[0], each[1].failures / max(1, each[1].tasks), each[1].number))
            if end < len(tasks):
                ranked = self._better_half(ranked)
                left = [version for _, version in ranked]
        beam = [version for _, version in ranked[: settings.beam_width]]
        for version in candidates:
            version.state = "kept" if version in beam else "dropped"
        logger.info(
            "%s candidates: %s", prefix_of(number), ", ".join(f"{v.version}:{_text(v.score)}" for v in candidates)
        )
        logger.info("%s top: %s", prefix_of(number), ", ".join(f"{v.version}:{mean:.3f}" for mean, v in ranked))
        if not beam:
            first = f"; the first failure: {failures[0]}" if failures else ""
            raise NoCandidateError(
                f"No beam candidates any more: of {len(candidates)} versions none earned something on at least "
                f"{settings.minimum_coverage:.0%} of {len(tasks)} validation tasks{first}"
            )
        return beam

    def _better_half(self, ranked: list[tuple[float, PromptVersion]]) -> list[tuple[float, PromptVersion]]:
        """Return the better half, at least as many as the beam holds, and those that equal the last of them."""
        count = max(self.settings.beam_width, math.ceil(len(ranked) / 2))
        return [each for place, each in enumerate(ranked) if place < count or each[0] == ranked[count - 1][0]]

    async def _judge(
        self, number: int, version: PromptVersion, tasks: Sequence[Any]
    ) -> tuple[PromptVersion, float | None, Sequence[RolloutResult]]:
        """Return a version with its mean on tasks, None where too few of them earned anything."""
        prefix = prefix_of(number, version=version.version)
        results, mean = await self.steps.evaluate_prompt_on_batch(version, version.target, tasks, "val", prefix=prefix)
        here = score_of(results, self.settings.missing)
        version.judged(score_of(self.player.known(version.templates, "val") or results, self.settings.missing))
        enough = here.scored > 0 and here.coverage >= self.settings.minimum_coverage
        if not enough:
            logger.warning("%s only %d of %d tasks earned something", prefix, here.scored, here.tasks)
        return version, mean if enough else None, results

    # --- the best ------------------------------------------------------------------------------------------------

    async def _lead(self, number: int, beam: Sequence[PromptVersion]) -> None:
        """Play a new leader on the whole validation set; it replaces the best if it is strictly better."""
        leader = leader_of(beam)
        leaders = [leader, beam[0]] if number == self.settings.beam_rounds and leader is not beam[0] else [leader]
        for version in leaders:
            if version.version in self._whole:
                logger.info("%s leads and was validated already", prefix_of(number, version=version.version))
                continue
            before = self.best
            mean = await self._validate(version, number)
            if version is not self.best:
                logger.warning(
                    "%s best not updated: %s with %s stays before %s",
                    *(prefix_of(number, version=version.version), before.version, _text(self.best_score), _text(mean)),
                )

    async def _validate_seed(self) -> None:
        seed = self.seed
        await self._validate(seed, 0)
        if seed.failures == seed.tasks:
            failures = (result["failure"] for result in self._whole[seed.version])
            raise NoCandidateError(
                f"The agent earned nothing on any of {seed.tasks} validation tasks with the seed; the first failure: "
                f"{next(filter(None, failures), 'no reward')}"
            )

    async def _validate(self, version: PromptVersion, number: int) -> float | None:
        """Return the mean of a version on the whole validation set; it becomes the best if it is strictly better."""
        _, mean, results = await self._judge(number, version, self.val)
        self._whole[version.version] = list(results)
        if mean is not None and mean > self.best_score:
            logger.info(
                "%s best updated: %s -> %.3f",
                *(prefix_of(number, version=version.version), _text(self.best_score), mean),
            )
            self.best, self.best_score = version, mean
            seeds = self._whole.get(self.seed.version)
            self.p_value = None if seeds is None or version is self.seed else sign_test(seeds, results)
        data = {"rewards": [r["final_reward"] for r in results], "tasks": tasks_of(self.val)}
        data |= {"failures": [r["failure"] for r in results], "version": version.version}
        data["rollout_ids"] = [r["rollout_id"] for r in results]
        await self.log.evaluation(number, "validation", data, value=mean)
        return mean

    async def _record_round(
        self, number: int, beam: Sequence[PromptVersion], children: Sequence[PromptVersion], seconds: float
    ) -> None:
        bill = self.critic.chat.bill
        states = [version.state for version in self.history.versions if version.round == number]
        figures: dict[str, object] = {
            "mean_reward": None if self.best_score == -math.inf else self.best_score,
            "best": self.best.version,
            "beam": {version.version: version.score for version in beam},
            "versions": len(states),
            "candidates": len(children),
            **{state: states.count(state) for state in WITHOUT_TEXT},
            "rollouts": self.player.rollouts,
            "calls": bill.calls,
            "tokens": bill.tokens,
            "cost": bill.cost,
            "seconds": seconds,
        }
        await self.log.step(number, figures)
        self.history.write(best=self.best.version, bill=bill.as_json())


def leader_of(beam: Sequence[PromptVersion]) -> PromptVersion:
    """Return the version of which it is surest that it is good: the greatest lower bound of the mean."""
    return max(beam, key=lambda each: -math.inf if each.interval is None else each.interval[0])


async def _all(works: Sequence[Any]) -> list[Any]:
    """Return what the works give, in order; the first error cancels the others and waits for them."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        raise


def _preview(template: PromptTemplate) -> str:
    return repr(cut(template.template, 50))


def _text(score: float | None) -> str:
    return "-" if score is None or score == -math.inf else f"{score:.3f}"
