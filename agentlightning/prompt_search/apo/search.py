"""The beam search over versions of prompts: rounds of critiques and edits, choice on validation tasks, the best so far.

Sources: ProTeGi (Pryzant et al., EMNLP 2023, arXiv:2305.03495), algorithm 1, and TextGrad (arXiv:2406.07496) for the
critique and the edit; successive halving (Jamieson and Talwalkar, AISTATS 2016, arXiv:1502.07943, figure 1) for the
choice. What we changed: the rollouts of a round run at once; scores are kept per prompt and task; the leader is the one
with the greatest lower bound of its interval over all validation tasks that it ran on, and only a new leader, and at
the end a few others, are evaluated on the whole validation set.
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
from typing import Any

from agentlightning.chat.bill import LimitReached
from agentlightning.chat.chat import ChatError
from agentlightning.prompt_search.apo.choosing import Chooser
from agentlightning.prompt_search.apo.critic import Branch, Critic, present
from agentlightning.prompt_search.apo.leading import Leaders
from agentlightning.prompt_search.apo.steps import SearchSettings, Steps, all_of, prefix_of
from agentlightning.prompt_search.candidates import check_version, same_text
from agentlightning.prompt_search.history import WITHOUT_TEXT, History, PromptVersion
from agentlightning.prompt_search.playing import PromptPlayer
from agentlightning.prompt_search.scores import NoCandidateError
from agentlightning.terminal import cut
from agentlightning.training.records import RunLog
from agentlightning.training.tasks import batch_iter_over_dataset
from agentlightning.types import PromptTemplate

logger = logging.getLogger("agentlightning.algorithm.apo")

_CALLS_OF_VERSION = 2
"""A critique and an edit."""


@dataclass
class BeamSearch:
    """One search. Belongs to the algorithm's loop; `leaders` and `history` hold what is known at any time."""

    steps: Steps
    settings: SearchSettings
    player: PromptPlayer
    critic: Critic
    history: History
    log: RunLog
    seed: PromptVersion
    names: Sequence[str]
    """The names of the templates, each edited in its turn."""
    train: Sequence[Any]
    val: Sequence[Any]
    leaders: Leaders = field(init=False)
    chooser: Chooser = field(init=False)
    stop_reason: str = field(default="interrupted", init=False)
    """`interrupted` until the search has ended by itself."""
    _over: set[str] = field(default_factory=set[str], init=False)
    """Versions that a limit stopped."""
    _texts: set[str] = field(default_factory=set[str], init=False)

    def __post_init__(self) -> None:
        self.chooser = Chooser(self.steps, self.settings, self.player)
        self.leaders = Leaders(self.chooser, self.log, self.seed, self.val)
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
                    await self.leaders.validate_seed()
            except LimitReached as error:
                reason = str(error)
            except NoCandidateError as error:
                reason = str(error)
                if self.critic.chat.seconds_left() <= 0:  # nothing ran because there was no time
                    reason = f"The limit on seconds is reached: {self.critic.chat.limits.seconds}"
                elif self.leaders.best_score == -math.inf:
                    raise
            number += 1
        if self.critic.chat.seconds_left() > 0:
            await self.leaders.choose_last(number - 1)
            self.history.write(best=self.leaders.best.version, bill=self.critic.chat.bill.as_json())
        self.stop_reason = reason or "finished"
        if reason is not None:
            logger.warning("The search ends early with %s as the best: %s", self.leaders.best.version, reason)

    async def _round(
        self, number: int, beam: list[PromptVersion], batches: Iterator[list[Any]], tasks: Sequence[Any]
    ) -> tuple[list[PromptVersion], str | None]:
        """Return the beam after a round, and why there can be no further one if so."""
        began = time.monotonic()
        children, reason = await self._children(number, beam, batches)
        candidates = list({version.version: version for version in (*beam, *children)}.values())
        beam = await self.chooser.choose(number, candidates, tasks)
        await self.leaders.lead(number, beam)
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
        slots = asyncio.Semaphore(self._versions_at_once())
        makings = [
            self._make(version, parents[b], batch, (b + 1, i + 1), slots)
            for version, (b, i), batch, old in zip(wanted, places, tasks, known, strict=True)
            if old is None
        ]
        made = iter(await all_of(makings))
        versions = [next(made) if old is None else old for old in known]
        self.history.add(versions)
        for version in versions:
            if version.state not in WITHOUT_TEXT:
                version.state = "candidate"
                if (text := self._text_of(version)) in self._texts:
                    version.state = "duplicate"
                self._texts.add(text)
        failed = [version for version in versions if version.state in ("failed", "refused")]
        reason = next((each.problems[0] for each in failed if each.version in self._over), None)
        if reason is None and len(failed) == len(versions):
            reason = f"critic and editor gave no version: {failed[0].problems[0]}"
            no_answer = all(version.state == "failed" for version in failed)
            if no_answer and len(self.history.versions) == len(versions) + 1:  # nothing was ever made
                raise ChatError(f"The search cannot begin: {reason}")
        return [version for version in versions if version.state == "candidate"], reason

    def _versions_at_once(self) -> int:
        """Return how many versions may be between critique and edit: a limit is to pay for whole versions, not for
        critiques alone."""
        critic = self.critic
        left = critic.chat.calls_left(critic.gradient_model, critic.apply_edit_model) // _CALLS_OF_VERSION
        return int(max(1, min(critic.chat.concurrency, left)))

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
        self,
        version: PromptVersion,
        parent: PromptVersion,
        tasks: Sequence[Any],
        place: tuple[int, int],
        slots: asyncio.Semaphore,
    ) -> PromptVersion:
        """Play the parent, ask critic and editor, check the text, and write the version down, however it ends."""
        prefix = prefix_of(version.round, *place, parent.version)
        branch = Branch(random.Random(f"{self.settings.seed} {version.version}"), prefix)
        view = dataclasses.replace(parent, target=version.target)
        results, _ = await self.steps.evaluate_prompt_on_batch(view, version.target, tasks, "train", prefix=prefix)
        token = present.set(branch)
        try:
            async with slots:
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

    # --- records -------------------------------------------------------------------------------------------------

    async def _record_round(
        self, number: int, beam: Sequence[PromptVersion], children: Sequence[PromptVersion], seconds: float
    ) -> None:
        bill = self.critic.chat.bill
        states = [version.state for version in self.history.versions if version.round == number]
        figures: dict[str, object] = {
            "mean_reward": None if self.leaders.best_score == -math.inf else self.leaders.best_score,
            "best": self.leaders.best.version,
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
        self.history.write(best=self.leaders.best.version, bill=bill.as_json())


def _preview(template: PromptTemplate) -> str:
    return repr(cut(template.template, 50))
