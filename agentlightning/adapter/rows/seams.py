"""Finds the reason why a call begins a row instead of continuing one, from its tokens and recorded messages.

A seam is between a call and its predecessor, the call whose conversation its prompt continues (`history.py`). If the
prompt has all messages of that call, the tokens drifted (`drift.py`). If messages differ, the agent changed its
context, and the first different message shows how. Without messages only the tokens are compared, which is less
precise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from agentlightning.adapter.calls.calls import ModelCall
from agentlightning.adapter.calls.conversation import Conversation, Line
from agentlightning.adapter.rows.drift import Decode, describe_tokens, drift_cause
from agentlightning.adapter.rows.history import History, Predecessor, conversation_of_call
from agentlightning.adapter.rows.prefix_tree import Walk, shared_length
from agentlightning.base.field_help import explain_fields

Beginning = Literal["first_call", "repeated_prompt", "branch"]
"""Rows that begin without a problem: the attempt's first call; a repeated prompt (parallel samples, a retry of the
client); a continuation of an earlier turn, token by token, that another call had already continued."""
SeamCause = Literal["template", "tokenisation", "edit", "truncation", "tool_result_changed", "other_agent"]
"""Reason why a prompt does not begin with the tokens of the conversation that it continues.

`template`: the chat template renders the same messages differently (thinking removed, tool calls rewritten).
`tokenisation`: the same text has other tokens. `edit`: the agent changed, added or summarised earlier messages.
`truncation`: the agent removed or shortened messages. `tool_result_changed`: the result of a tool differs.
`other_agent`: another agent, or another conversation of the same agent.
"""
RowCause = Literal[Beginning, SeamCause]
"""Reason why a row begins."""
ROW_CAUSES: Final[tuple[RowCause, ...]] = (*get_args(Beginning), *get_args(SeamCause))
SEAM_CAUSES: Final[frozenset[RowCause]] = frozenset(get_args(SeamCause))
DRIFTS: Final[frozenset[RowCause]] = frozenset(("template", "tokenisation"))
"""Causes in template and tokenizer, not in the agent's behaviour."""

_OPENING: Final = 2
"""Number of tokens at the end of a prompt that may already belong to the answer, such as a thinking tag."""
_WINDOW: Final = 16
"""Number of tokens after the first difference that are searched, if the messages were not recorded."""
_LEAST_CUT: Final = 8
"""Minimum number of characters of a shortened text; a shorter text counts as a different text."""


@explain_fields
@dataclass(frozen=True, slots=True)
class RowStart:
    """The first call of a row and the reason why it began one."""

    call_id: str
    """Id of the first call of the row."""
    cause: RowCause
    """Reason why it did not continue another row."""
    previous: str | None = None
    """The call whose conversation it continues, if one was found."""
    at: int = 0
    """Length of the common beginning of its prompt and that call's tokens."""


class Seams:
    """Finds the reasons why calls of one attempt begin rows. Reads the messages of calls only when it needs them."""

    def __init__(self, calls: Sequence[ModelCall], decode: Decode | None = None) -> None:
        self._calls = calls
        self._decode = decode
        self._history = History()
        self._known = 0
        self._read: dict[int, Conversation | None] = {}

    def start(self, number: int, walk: Walk[Any]) -> RowStart:
        """Return the reason why this call begins a row. Follow its prompt first. Call this in order."""
        call = self._calls[number]
        while self._known < number:
            read = self._read.pop(self._known, None) or conversation_of_call(self._calls[self._known])
            self._history.add(self._calls[self._known], read)
            self._known += 1
        conversation = self._read[number] = conversation_of_call(call)
        if conversation is not None:
            predecessor = self._history.predecessor(conversation)
            if predecessor is not None:
                # a prompt that continues its predecessor's while its text does not: the text was not kept
                before = predecessor.call.prompt_token_ids
                goes_on = call.prompt_token_ids[: len(before)] == before
                if not (goes_on and conversation.request == predecessor.conversation.request):
                    return self._by_words(call, conversation, predecessor)
            elif len(self._history):
                return RowStart(call.call_id, "other_agent")
        return self._by_tokens(call, walk)

    def _by_words(self, call: ModelCall, conversation: Conversation, predecessor: Predecessor) -> RowStart:
        row, before = tokens_of(predecessor.call), predecessor.conversation
        at = shared_length(row, call.prompt_token_ids)
        same_instructions = (conversation.system, conversation.tools) == (before.system, before.tools)
        if same_instructions and conversation.lines == before.lines:
            cause: RowCause = "repeated_prompt"
        elif same_instructions and predecessor.is_continued and at == len(row):
            cause = self._taken(call, conversation, predecessor)
        elif _are_others(call, predecessor.call):
            cause = "other_agent"
        elif same_instructions and predecessor.is_continued:
            cause = drift_cause(
                row,
                call.prompt_token_ids,
                at,
                answer_from=len(predecessor.call.prompt_token_ids),
                verbatim=before.verbatim,
                cut_short=predecessor.call.finish_reason == "length",
                decode=self._decode,
            )
        elif not same_instructions:
            old, new = before.system, conversation.system
            alike = 2 * _alike_ends(old, new) >= max(len(old), len(new))
            cause = "truncation" if _is_cut(old, new) else "edit" if alike else "other_agent"
        else:
            cause = _other_lines(conversation, predecessor)
        return RowStart(call.call_id, cause, predecessor.call.call_id, at)

    def _taken(self, call: ModelCall, conversation: Conversation, predecessor: Predecessor) -> RowCause:
        """Return how two continuations differ: this call continues the row exactly, but another call already did."""
        sibling = self._history.longest(conversation)
        if sibling is not None:
            if conversation.lines == sibling.conversation.lines:
                return "repeated_prompt"
            predecessor = sibling
        old, new = predecessor.conversation.whole[predecessor.common :], conversation.lines[predecessor.common :]
        if old and new and old[0].role == new[0].role in ("tool", "assistant"):  # a changed result or reply
            return _other_lines(conversation, predecessor)
        return "other_agent" if _are_others(call, predecessor.call) else "branch"

    def _by_tokens(self, call: ModelCall, walk: Walk[Any]) -> RowStart:
        if walk.beside is None:
            return RowStart(call.call_id, "branch" if walk.after_turn and not walk.in_completion else "other_agent")
        before, prompt = self._calls[walk.beside], call.prompt_token_ids
        row = tokens_of(before)
        at = shared_length(row, prompt)
        if _are_others(call, before):
            cause: RowCause = "other_agent"
        elif walk.after_turn and not walk.in_completion:
            cause = "branch"
        elif walk.in_completion or at >= len(before.prompt_token_ids) - _OPENING:
            answer_from = min(at, len(before.prompt_token_ids))
            cut_short = before.finish_reason == "length"
            cause = drift_cause(
                row, prompt, at, answer_from=answer_from, verbatim=True, cut_short=cut_short, decode=self._decode
            )
        elif _is_within(prompt[at : at + _WINDOW], row[at + 1 :]):
            cause = "truncation"
        else:
            cause = "edit" if _is_within(row[at : at + _WINDOW], prompt[at + 1 :]) else "other_agent"
        return RowStart(call.call_id, cause, before.call_id, at)


def tokens_of(call: ModelCall) -> list[int]:
    """Return the prompt of a call with its completion."""
    return call.prompt_token_ids + call.completion_token_ids


def describe(
    start: RowStart, calls: Sequence[ModelCall], decode: Decode | None = None, names: Mapping[str, str] | None = None
) -> str:
    """Return a seam as text: the tokens around the first difference, and the first messages that differ.

    `names` replaces the ids of calls.
    """
    names = names or {}
    by_id = {call.call_id: call for call in calls}
    call, before = by_id[start.call_id], by_id.get(start.previous or "")
    if before is None:
        return f"call {names.get(call.call_id, call.call_id)} begins a row: {start.cause}"
    first, second = (names.get(each.call_id, each.call_id) for each in (before, call))
    why = " (the thinking of that reply is missing)" if _leaves_out_thinking(start, before, call, decode) else ""
    lines = [
        f"call {second} does not continue call {first}: {start.cause}{why}, after {start.at} equal tokens",
        f"  recorded: {describe_tokens(tokens_of(before), start.at, decode)}",
        f"  prompt:   {describe_tokens(call.prompt_token_ids, start.at, decode)}",
    ]
    conversation, earlier = conversation_of_call(call), conversation_of_call(before)
    if conversation is not None and earlier is not None:
        heads = ((earlier.system, conversation.system), (earlier.tools, conversation.tools))
        differing = [texts for texts in heads if texts[0] != texts[1]]
        if differing:
            old, new = differing[0]
        else:
            old_lines, new_lines = earlier.whole, conversation.lines
            at = next((i for i, (a, b) in enumerate(zip(old_lines, new_lines, strict=False)) if a != b), None)
            if at is None:  # all messages are there, in other tokens
                at = max(0, min(len(old_lines), len(new_lines)) - 1)
            old, new = (each[at].describe() if at < len(each) else "nothing" for each in (old_lines, new_lines))
        lines += [f"  earlier:  {_brief(old)}", f"  now:      {_brief(new)}"]
    return "\n".join(lines)


def _leaves_out_thinking(start: RowStart, before: ModelCall, call: ModelCall, decode: Decode | None) -> bool:
    """True if a template shows an earlier reply without the text between its tags of thinking."""
    if start.cause != "template" or decode is None:
        return False
    thinking, closing, _ = decode(before.completion_token_ids).partition("</think>")
    thinking = thinking.rpartition("<think>")[2].strip()
    return bool(closing and thinking) and thinking not in decode(call.prompt_token_ids)


# --- messages --------------------------------------------------------------------------------------------------------


def _are_others(call: ModelCall, before: ModelCall) -> bool:
    if call.policy != before.policy:
        return True
    return call.agent is not None and before.agent is not None and call.agent != before.agent


def _other_lines(conversation: Conversation, predecessor: Predecessor) -> RowCause:
    """Return the change in the lines after the common ones."""
    old, new = predecessor.conversation.whole[predecessor.common :], conversation.lines[predecessor.common :]
    if not new or _only_left_out(old, new) or (new[0].role == old[0].role and _is_cut(old[0].text, new[0].text)):
        return "truncation"
    if new[0].role == old[0].role == "tool":
        return "tool_result_changed"
    made_from_it = (
        predecessor.by_answer
        or predecessor.common >= len(predecessor.conversation.lines)
        or (predecessor.common and len(new) > 1)
    )
    return "edit" if made_from_it else "other_agent"


def _only_left_out(old: Sequence[Line], new: Sequence[Line]) -> bool:
    """True if the new lines are some of the old ones in their order, perhaps followed by further ones."""
    old_lines, at, count, stranger = frozenset(old), 0, 0, False
    for line in new:
        try:
            place = old.index(line, at) if line in old_lines else None
        except ValueError:
            place = None
        if place is None:
            stranger = True
        elif stranger:
            return False
        else:
            at, count = place + 1, count + 1
    return count > 0


def _is_cut(old: str, new: str) -> bool:
    """True if the new text is the old one without its end, its beginning or its middle, apart from a short mark."""
    if not _LEAST_CUT <= len(new) < len(old):
        return False
    length = _alike_ends(old, new)
    return length == len(new) or (3 * length >= 2 * len(new) and 4 * (len(old) - len(new)) >= len(new))


def _alike_ends(left: str, right: str) -> int:
    """Return the number of characters that two texts have in common at their beginnings and ends together."""
    most = min(len(left), len(right))
    head = next((at for at in range(most) if left[at] != right[at]), most)
    tail = next((at for at in range(most - head) if left[-1 - at] != right[-1 - at]), most - head)
    return head + tail


def _brief(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:100]} ... {text[-50:]}"


# --- tokens alone ----------------------------------------------------------------------------------------------------


def _is_within(part: Sequence[int], whole: Sequence[int]) -> bool:
    if not part:
        return False
    places = (place for place in range(len(whole) - len(part) + 1) if whole[place] == part[0])
    return any(whole[place : place + len(part)] == part for place in places)
