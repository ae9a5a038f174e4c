"""Finds the calls of an attempt that never got an answer, so that its reward says nothing about the policy.

A framework may accept a refusal, return an empty text, and have the rollout scored 0 for it; a program may give up
after its last retry. That is a fault of the environment, and a fault is not a low reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agentlightning.adapter.calls.calls import ModelCall
from agentlightning.adapter.calls.conversation import Conversation, conversation_of
from agentlightning.adapter.spans.tokens import body_digest, refused_for_budget

REFUSED_CALL: Final = "refused_call"
"""Reason of the exclusion of an attempt with such a call."""
_WITHOUT_ANSWER: Final = frozenset(("refused", "upstream_error"))


def refused_for_good(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """Return the calls of one attempt that got an error from the gateway, and no answer to the same request later.

    An error is a refusal of the gateway (4xx), an error passed on from the model server, or a failure on the way (429,
    5xx, a timeout of the gateway, a stream that broke off): these differ in the effect of a retry, not for the
    agent. So a 429 or 503 counts only if the program's retries, or the lack of them, left it without an answer. Not
    counted: a call that was refused for its budget, which has a reason of its own, and one whose connection the program
    closed itself (`client_left`).

    *The same request* is one whose body had the same bytes, as the retries of clients have, or the same turn of the
    same conversation. A call is one of these if its messages are those of the failed
    one in order, in role, text and tool calls, where

    - fields other than the messages do not count (`response_format`, `tools`, `temperature`, `stream`, the model, the
      dialect), so the retry of a framework that takes out the field that was refused is one;
    - system messages do not count, and the last message may continue after the text of the failed one, and further
      messages may follow that are not the assistant's: the fallback may describe its format there.

    It must have been answered, and have ended after the failed call had begun. A failed call whose messages are not
    known (there was no room for its bytes, its body was no JSON, or the gateway keeps no texts) is recognised by the
    bytes of its body only.
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
