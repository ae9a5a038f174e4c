"""Chooses among the rollouts that a store has, and checks that the model reads their tokens as they were written."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from agentlightning.adapter import TraceToTripletBase
from agentlightning.adapter.messages import TraceToMessages
from agentlightning.errors import BadRequestError, NotFoundError
from agentlightning.store.base import FINISHED, LightningStore
from agentlightning.store.read_operations import pages_of
from agentlightning.store.rules.values import to_json
from agentlightning.store.unset import UNSET, Unset
from agentlightning.training.chosen.choosing import Candidate, Pick, counts_text, left_out
from agentlightning.training.chosen.sft_settings import SFTSettings
from agentlightning.training.ledger import RolloutRecord
from agentlightning.training.rollouts import Evidence, evidence
from agentlightning.training.rows import read_records
from agentlightning.types import Rollout

if TYPE_CHECKING:
    from agentlightning.training.learner.policy import Policy

_NAMED_AT_MOST: Final = 5


@dataclass
class Choice:
    """The rollouts that a run trains, in the order in which they were made or named, and why others are left out."""

    chosen: list[str] = field(default_factory=list[str])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """Rollouts by id: of the ledger's reasons those for which nothing of one can be trained, and those of a choice."""


async def choose_stored(
    store: LightningStore,
    settings: SFTSettings,
    adapter: TraceToTripletBase,
    pick: Pick | None,
) -> Choice:
    """Return which rollouts of a store are trained. Reads one rollout at a time.

    Raises:
        NotFoundError: the store has no rollout of an id that was given.
        BadRequestError: a rollout that was named cannot be trained, or none is chosen; says why.
    """
    reasons: dict[str, str] = {}
    candidates: list[Candidate] = []
    async for rollout in _candidates(store, settings):
        record = read_records(
            [await evidence(store, rollout)], adapter, train_refused=settings.refused_calls == "train"
        )[0]
        why = _why_not(record)
        if why is not None:
            reasons[rollout.rollout_id] = why
        elif pick is not None and not pick(rollout, record.reward or 0.0):
            reasons[rollout.rollout_id] = "not_picked"
        else:
            task = json.dumps(to_json(rollout.input), sort_keys=True)
            candidates.append(Candidate(rollout.rollout_id, task, record.reward or 0.0))
    if settings.named is not None and (unusable := {i: why for i, why in reasons.items() if why != "not_picked"}):
        told = ", ".join(f"{i} ({why})" for i, why in list(unusable.items())[:_NAMED_AT_MOST])
        raise BadRequestError(
            f"{len(unusable)} of the {len(settings.named)} rollouts that were named cannot be trained: {told}. "
            "See why with: agl rollouts explain <rollout id>; leave them out of rollouts="
        )
    seen = len(candidates) + len(reasons)
    reasons |= left_out(candidates, settings.rule)
    chosen = [one.rollout_id for one in candidates if one.rollout_id not in reasons]
    if not chosen:
        best = max((one.reward for one in candidates), default=None)
        told = f"left out: {counts_text(reasons)}; the best reward is {best}" if seen else "there are none"
        of = "" if settings.from_run is None else f" of run {settings.from_run!r}"
        raise BadRequestError(
            f"No rollout is chosen out of the {seen} ended training rollouts{of} of the store: {told}. Rollouts need a "
            "reward, and model calls with token ids and log-probabilities, as the engine of GRPO and vLLM give them"
        )
    return Choice(chosen, reasons)


def check_tokens(rollout: Evidence, record: RolloutRecord, policy: Policy) -> bool:
    """Return whether the text of a rollout shows that its token ids are those of the model's tokenizer; false where it
    has no text.

    Raises:
        BadRequestError: an id is beyond the vocabulary, or none of the recorded replies is what the tokens spell.
    """
    size = policy.model.config.get_text_config().vocab_size
    largest = max(max(sample.token_ids) for sample in record.samples)
    way_out = "Train the model that the rollouts were sampled from, or one with its tokenizer"
    if largest >= size:
        raise BadRequestError(
            f"Rollout {record.rollout_id} has the token id {largest}, and the vocabulary of the model ends at "
            f"{size - 1}: it was sampled with another tokenizer. {way_out}"
        )
    tokenizer: Any = policy.tokenizer
    spelt = "\n".join(
        _plain(tokenizer.decode(sample.token_ids, clean_up_tokenization_spaces=False)) for sample in record.samples
    )
    replies = [
        call["messages"][-1].get("content") for call in TraceToMessages().adapt(rollout.counted) if call["messages"]
    ]
    said = [text for reply in replies if isinstance(reply, str) and (text := _plain(reply))]
    if said and not any(text in spelt for text in said):
        raise BadRequestError(
            f"Rollout {record.rollout_id} was sampled with another tokenizer: its reply is {said[0][:60]!r}, and none "
            f"of its replies is in what the model's tokenizer makes of its tokens, {spelt[-60:]!r}. {way_out}"
        )
    return bool(said)


def _plain(text: str) -> str:
    return "".join(text.split())


def _why_not(record: RolloutRecord) -> str | None:
    if record.verdict is not None:
        return record.verdict
    if record.reward is None:
        return "no_reward"
    return None if record.samples else next(iter(record.exclusions.values()), "no_call")


async def _candidates(store: LightningStore, settings: SFTSettings) -> AsyncIterable[Rollout]:
    if settings.named is not None:
        found = {one: await store.get_rollout_by_id(one) for one in settings.named}
        unknown = [one for one, rollout in found.items() if rollout is None]
        if unknown:
            told = ", ".join(unknown[:_NAMED_AT_MOST])
            raise NotFoundError(
                f"The store has no rollout {told}{' and others' if len(unknown) > _NAMED_AT_MOST else ''}: "
                f"{len(unknown)} of {len(found)} ids of rollouts= are unknown. See what it has with: agl rollouts list"
            )
        for rollout in found.values():
            assert rollout is not None
            yield rollout
        return
    of_run: str | Unset | None = UNSET if settings.from_run is None else settings.from_run or None
    async for page in pages_of(store.query_rollouts, sort_by="start_time", run_id=of_run):
        for rollout in page:
            if rollout.mode not in ("val", "test") and rollout.status in FINISHED:
                yield rollout
