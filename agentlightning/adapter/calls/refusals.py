"""Finds the calls of an attempt that never received a reply, so that its reward does not measure the policy.

A framework may accept a refusal and return an empty text, for which the rollout is scored 0; a program may give up
after its last retry. That is an error of the environment, which is not a low reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agentlightning.adapter.calls.calls import ModelCall
from agentlightning.adapter.calls.conversation import Conversation, conversation_of
from agentlightning.adapter.spans.tokens import body_digest, refused_for_budget

REFUSED_CALL: Final = "refused_call"
"""Reason for excluding an attempt with such a call."""
_WITHOUT_ANSWER: Final = frozenset(("refused", "upstream_error"))


def refused_for_good(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """Return the calls of one attempt that received an error from the gateway, and no later reply to the same request.

    An error is a refusal of the gateway (4xx), an error of the model server, or a transport failure (429, 5xx, a
    timeout of the gateway, an interrupted stream): a retry may or may not help, but the agent sees an error in each
    case. A 429 or 503 counts only if no retry of the program received a reply. Calls that were refused for their
    budget, which have a separate reason, and calls whose connection the program closed (`client_left`) are not counted.

    *The same request* is one whose body had the same bytes, as the retries of clients have, or the same turn of the
    same conversation. A call is the same turn if its messages equal those of the failed call in order, role, text and
    tool calls, where

    - fields other than the messages do not count (`response_format`, `tools`, `temperature`, `stream`, the model, the
      dialect), so the retry of a framework that removes the refused field counts;
    - system messages do not count; the last message may continue after the text of the failed one; and additional
      messages may follow that are not the assistant's, because a fallback may describe its format there.

    It must have received a reply, and have ended after the failed call began. A failed call whose messages are unknown
    (its bytes were not stored, its body was not JSON, or the gateway keeps no texts) is recognised only by the bytes of
    its body.
    """
    failed = [call for call in calls if _got_an_error(call)]
    if not failed:
        return []
    answers = [(call, _conversation(call)) for call in calls if call.state not in ("client_left", *_WITHOUT_ANSWER)]
    return [call for call in failed if not _is_answered(call, answers)]


def _got_an_error(call: ModelCall) -> bool:
    record = None if call.spans is None else call.spans.record
    return record is not None and call.state in _WITHOUT_ANSWER and not refused_for_budget(record)


def _is_answered(failed: ModelCall, answers: Sequence[tuple[ModelCall, Conversation | None]]) -> bool:
    conversation, digest = _conversation(failed), _digest(failed)
    return any(
        _ended_after(call, failed)
        and (
            (digest is not None and digest == _digest(call))
            or (conversation and again and _is_same_turn(conversation, again))
        )
        for call, again in answers
    )


def _conversation(call: ModelCall) -> Conversation | None:
    own = call.spans
    return None if own is None else conversation_of(own.request, own.record, own.seen)


def _digest(call: ModelCall) -> str | None:
    record = None if call.spans is None else call.spans.record
    return None if record is None else body_digest(record)


def _ended_after(call: ModelCall, failed: ModelCall) -> bool:
    if call.sequence_id > failed.sequence_id:
        return True
    spans = [None if each.spans is None else each.spans.record for each in (call, failed)]
    end, start = getattr(spans[0], "end_time", None), getattr(spans[1], "start_time", None)
    return end is not None and start is not None and end >= start


def _is_same_turn(request: Conversation, again: Conversation) -> bool:
    if not request.lines:
        return request.system == again.system and not again.lines
    count = len(request.lines)
    if len(again.lines) < count or again.lines[: count - 1] != request.lines[:-1]:
        return False
    last, there = request.lines[-1], again.lines[count - 1]
    goes_on = (last.role, last.calls) == (there.role, there.calls) and there.text.startswith(last.text)
    return goes_on and all(line.role != "assistant" for line in again.lines[count:])
