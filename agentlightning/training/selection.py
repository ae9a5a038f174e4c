"""Selects rollouts for supervised fine-tuning, from each step or from the store: by id, by a function, by a minimum
reward, the best of each task, the best of all."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from typing_extensions import override

from agentlightning.adapter import TraceToTripletBase
from agentlightning.adapter.messages import TraceToMessages
from agentlightning.base.terminal import counted
from agentlightning.errors import BadRequestError, NoScoredRolloutError, NotFoundError
from agentlightning.store.base import FINISHED, UNSET, LightningStore, Unset
from agentlightning.store.cursors import pages_of
from agentlightning.store.rules.values import to_json
from agentlightning.training.collector import ReadRollouts, StepCollector
from agentlightning.training.context import TrainingContext
from agentlightning.training.ledger import Ledger, RolloutRecord
from agentlightning.training.rollouts import Evidence, evidence
from agentlightning.training.rows import StepRows, is_over_length, read_records
from agentlightning.training.run_checks import Endings
from agentlightning.training.settings import Pick
from agentlightning.training.sft_settings import SFTSettings
from agentlightning.types import Rollout

if TYPE_CHECKING:
    from agentlightning.engine.served import ServedModel

LeftOut = Literal["not_named", "not_picked", "below_min_reward", "not_best_of_task", "not_in_top_share"]
"""Reasons why a rollout with a reward is not chosen: its id was not listed; the function rejected it; its reward."""
_NAMED_AT_MOST: Final = 5


class SelectionEndings(Endings):
    """Counts outcomes and chosen rollouts; a run without chosen rollouts ends with an error."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = 0
        self.best: float | None = None
        """Largest reward of all rollouts."""

    @override
    def state(self) -> dict[str, Any]:
        return {**super().state(), "chosen": self.chosen, "best": self.best}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.chosen, self.best = state["chosen"], state["best"]

    @override
    def require_scored(self) -> None:
        super().require_scored()
        if not self.chosen:
            raise NoScoredRolloutError(
                f"The run chose no rollout to learn from: the best reward was {self.best}. The model is unchanged. "
                "Reduce min_reward, or use best_per_task or top_share, which always choose rollouts"
            )


class SelectingCollector(StepCollector):
    """Collects the rollouts for supervised fine-tuning. Belongs to the loop of the run.

    If a run uses stored rollouts, its tasks are their ids.
    """

    def __init__(self, context: TrainingContext, tasks: list[object]) -> None:
        super().__init__(context, tasks)
        self.endings: SelectionEndings = SelectionEndings()
        self._tokens_checked = False

    @property
    def _settings(self) -> SFTSettings:
        assert isinstance(self._context.settings, SFTSettings)
        return self._context.settings

    @override
    async def collect(self, step: int, resources_id: str, ledger: Ledger) -> tuple[list[Rollout], StepRows]:
        if self._settings.collects:
            return await super().collect(step, resources_id, ledger)
        store, read = self._context.store, ReadRollouts()
        for number, rollout_id in enumerate(self._plan.tasks_of(step)):
            rollout = await store.get_rollout_by_id(str(rollout_id))
            assert rollout is not None, rollout_id  # it existed when the run began
            ended = await evidence(store, rollout)
            [record] = self._records([ended])
            if not self._tokens_checked and record.samples:
                policy = self._context.updater.learners[0].policy
                self._tokens_checked = await asyncio.to_thread(check_tokens, ended, record, policy)
            read.evidence.append(ended)
            read.records.append(record)
            read.groups.append(number)
        rows = await self._choose(read, ledger, ())
        self._watch(step, read.evidence, rows, 0)
        return read.rollouts, rows

    @override
    async def _choose(self, read: ReadRollouts, ledger: Ledger, replaced: Collection[int]) -> StepRows:
        scored = [
            (rollout, record, Candidate(rollout.rollout_id, group, record.reward))
            for rollout, record, group in zip(read.rollouts, read.records, read.groups, strict=True)
            if record.verdict is None and record.reward is not None
        ]
        for record in read.records:
            ledger.add(record)
        pick, reasons = self._context.pick, dict[str, LeftOut]()
        if self._settings.collects:
            reasons |= {r.rollout_id: "not_picked" for r, _, one in scored if pick and not pick(r, one.reward)}
            usable = [one for _, record, one in scored if record.samples and one.rollout_id not in reasons]
            reasons |= left_out(usable, self._settings)
        rewards = [candidate.reward for *_, candidate in scored]
        rows = StepRows(rewards=rewards, kept_rewards=rewards, records=list(read.records), groups=list(read.groups))
        for _, record, _ in scored:
            over_length = "over_length" if is_over_length(record, self._settings) else None
            rows.add(record, 1.0, ledger, "not_chosen" if record.rollout_id in reasons else over_length)
        self.endings.chosen += len({sample.rollout_id for sample in rows.samples})
        self.endings.best = max([*rewards, *([] if self.endings.best is None else [self.endings.best])], default=None)
        if rewards and not rows.samples:
            self._context.alarm(
                f"step {ledger.step}: none of {counted(len(rewards), 'scored rollout')} was chosen: the best reward is "
                f"{max(rewards):g}; excluded: {counts_text(reasons)}",
                "none_chosen",
            )
        return rows


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rollout to choose from."""

    rollout_id: str
    task: object
    """Hashable key of the task, equal for its rollouts."""
    reward: float


def left_out(candidates: Sequence[Candidate], rule: SFTSettings) -> dict[str, LeftOut]:
    """Return the reason for each excluded rollout, by its id.

    `min_reward`, `best_per_task` and `top_share` apply in this order, each to the remaining rollouts. Among rollouts
    with the same reward, the first are chosen.
    """
    reasons: dict[str, LeftOut] = {}
    rest = list(candidates)

    def keep(chosen: Sequence[Candidate], reason: LeftOut) -> list[Candidate]:
        ids = {one.rollout_id for one in chosen}
        reasons.update({one.rollout_id: reason for one in rest if one.rollout_id not in ids})
        return [one for one in rest if one.rollout_id in ids]

    def by_reward() -> list[Candidate]:
        return sorted(rest, key=lambda one: -one.reward)

    if rule.min_reward is not None:
        rest = keep([one for one in rest if one.reward >= rule.min_reward], "below_min_reward")
    if rule.best_per_task is not None:
        of_task: dict[object, list[Candidate]] = {}
        for one in by_reward():
            of_task.setdefault(one.task, []).append(one)
        best = [one for ranked in of_task.values() for one in ranked[: rule.best_per_task]]
        rest = keep(best, "not_best_of_task")
    if rule.top_share is not None:
        keep(by_reward()[: max(1, round(rule.top_share * len(rest)))], "not_in_top_share")
    return reasons


def counts_text(reasons: Mapping[str, str]) -> str:
    """Return the number of rollouts that each reason excludes, as text."""
    return ", ".join(f"{count} {reason}" for reason, count in Counter(reasons.values()).most_common()) or "none"


# --- those of the store ----------------------------------------------------------------------------------------------


async def choose_stored(
    store: LightningStore, settings: SFTSettings, adapter: TraceToTripletBase, pick: Pick | None
) -> tuple[list[str], dict[str, str]]:
    """Return the ids of a store's rollouts to train, in the order of their creation or of the list, and the reasons for
    excluding others, by id. Reads one rollout at a time.

    Raises:
        NotFoundError: the store has no rollout with one of the ids.
        BadRequestError: a rollout of the list cannot be trained, or none is chosen. The message gives the reason.
    """
    reasons: dict[str, str] = {}
    candidates: list[Candidate] = []
    async for rollout in _ended_rollouts(store, settings):
        ended = await evidence(store, rollout)
        [record] = read_records([ended], adapter, train_refused=settings.refused_calls == "train")
        why = _why_not(record)
        if why is None and pick is not None and not pick(rollout, record.reward or 0.0):
            why = "not_picked"
        if why is not None:
            reasons[rollout.rollout_id] = why
        else:
            task = json.dumps(to_json(rollout.input), sort_keys=True)
            candidates.append(Candidate(rollout.rollout_id, task, record.reward or 0.0))
    if settings.named is not None and (unusable := {i: why for i, why in reasons.items() if why != "not_picked"}):
        examples = ", ".join(f"{i} ({why})" for i, why in list(unusable.items())[:_NAMED_AT_MOST])
        raise BadRequestError(
            f"{len(unusable)} of {counted(len(settings.named), 'listed rollout')} cannot be used for training: "
            f"{examples}. To see why: agl rollouts explain <rollout id>. Remove them from rollouts="
        )
    total = len(candidates) + len(reasons)
    reasons |= left_out(candidates, settings)
    chosen = [one.rollout_id for one in candidates if one.rollout_id not in reasons]
    if not chosen:
        best = max((one.reward for one in candidates), default=None)
        why = f"excluded: {counts_text(reasons)}; the best reward is {best}" if total else "the store has none"
        of = "" if settings.from_run is None else f" of run {settings.from_run!r}"
        raise BadRequestError(
            f"No rollout is chosen out of {counted(total, 'ended training rollout')}{of} in the store: {why}. A "
            "rollout needs a reward and model calls with token ids and log-probabilities, as from vLLM or GRPO's engine"
        )
    return chosen, reasons


def check_tokens(rollout: Evidence, record: RolloutRecord, policy: ServedModel) -> bool:
    """Return whether the text of a rollout confirms that its token ids belong to the model's tokenizer; False without
    text.

    Raises:
        BadRequestError: an id is beyond the vocabulary, or no recorded reply equals the decoded tokens.
    """
    size = policy.model.config.get_text_config().vocab_size
    largest = max(max(sample.token_ids) for sample in record.samples)
    way_out = "Train the model that the rollouts were sampled from, or one with its tokenizer"
    if largest >= size:
        raise BadRequestError(
            f"Rollout {record.rollout_id} has the token id {largest}, but the vocabulary of the model ends at "
            f"{size - 1}: the rollout was sampled with a different tokenizer. {way_out}"
        )
    tokenizer: Any = policy.tokenizer
    decoded = [tokenizer.decode(sample.token_ids, clean_up_tokenization_spaces=False) for sample in record.samples]
    spelt = "\n".join(map(_without_spaces, decoded))
    calls = TraceToMessages().adapt(rollout.counted)
    replies = [call["messages"][-1].get("content") for call in calls if call["messages"]]
    texts = [text for reply in replies if isinstance(reply, str) and (text := _without_spaces(reply))]
    if texts and not any(text in spelt for text in texts):
        raise BadRequestError(
            f"Rollout {record.rollout_id} was sampled with a different tokenizer: its reply is {texts[0][:60]!r}, but "
            f"the model's tokenizer decodes its tokens to {spelt[-60:]!r}. {way_out}"
        )
    return bool(texts)


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _why_not(record: RolloutRecord) -> str | None:
    if record.verdict is not None:
        return record.verdict
    if record.reward is None:
        return "no_reward"
    return None if record.samples else next(iter(record.exclusions.values()), "no_call")


async def _ended_rollouts(store: LightningStore, settings: SFTSettings) -> AsyncIterable[Rollout]:
    if settings.named is not None:
        rollouts = {one: await store.get_rollout_by_id(one) for one in settings.named}
        unknown = [one for one, rollout in rollouts.items() if rollout is None]
        if unknown:
            names = ", ".join(unknown[:_NAMED_AT_MOST]) + (" and others" if len(unknown) > _NAMED_AT_MOST else "")
            raise NotFoundError(
                f"The store has no rollout {names}: {len(unknown)} of {len(rollouts)} ids of rollouts= are unknown. To "
                "list its rollouts: agl rollouts list"
            )
        for rollout in rollouts.values():
            assert rollout is not None
            yield rollout
        return
    of_run: str | Unset | None = UNSET if settings.from_run is None else settings.from_run or None
    async for page in pages_of(store.query_rollouts, sort_by="start_time", run_id=of_run):
        for rollout in page:
            if rollout.mode not in ("val", "test") and rollout.status in FINISHED:
                yield rollout
