"""A tree of token sequences that share their beginnings. It finds the row that a prompt continues, or the difference.

Every sequence is compared once with fast list comparison, so the cost is linear in the tokens of all calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Row = TypeVar("Row")


class PrefixNode(Generic[Row]):
    """The end of a segment of tokens: those of the edge to this node are `tokens[start:stop]`."""

    __slots__ = ("children", "generated", "owner", "prompt_end", "rows", "start", "stop", "tokens", "turn_end")

    def __init__(self, tokens: list[int], start: int, stop: int, *, generated: bool, owner: int) -> None:
        self.tokens, self.start, self.stop = tokens, start, stop
        self.generated = generated
        """True if the policy produced the tokens of the edge."""
        self.owner = owner
        """The call whose tokens created the edge."""
        self.children: dict[int, PrefixNode[Row]] = {}
        self.rows: list[Row] = []
        """Rows whose tokens so far end exactly here."""
        self.prompt_end = False
        self.turn_end = False


@dataclass(slots=True)
class Walk(Generic[Row]):
    """The result of following a prompt from the root to its end."""

    end: PrefixNode[Row]
    longest: PrefixNode[Row] | None = None
    """The deepest node on the path at which a row ends."""
    after_turn: bool = False
    """True if the path contains the end of an earlier turn."""
    fresh: bool = False
    """True if the prompt has tokens that no earlier sequence had at this position."""
    in_completion: bool = False
    """True if it differs from the others within or before tokens that the policy generated there."""
    beside: int | None = None
    """The call that shares the tokens before the difference, or None."""


class PrefixTree(Generic[Row]):
    """Token sequences of one attempt, prompts and completions alternating."""

    def __init__(self) -> None:
        self._root: PrefixNode[Row] = PrefixNode([], 0, 0, generated=False, owner=0)

    def follow_prompt(self, prompt: list[int], owner: int) -> Walk[Row]:
        """Follow a prompt from the root, add its new tokens, and return the result. `owner`: number of its call."""
        walk: Walk[Row] = Walk(self._root)
        self._add(prompt, walk, generated=False, owner=owner)
        return walk

    def add_completion(self, prompt_end: PrefixNode[Row], completion: list[int], owner: int) -> PrefixNode[Row]:
        """Add the policy's answer to a prompt and return the end of the turn."""
        prompt_end.prompt_end = True
        walk = Walk(prompt_end)
        self._add(completion, walk, generated=True, owner=owner)
        walk.end.turn_end = True
        return walk.end

    def _add(self, tokens: list[int], walk: Walk[Row], *, generated: bool, owner: int) -> None:
        at, total = 0, len(tokens)
        while at < total:
            child = walk.end.children.get(tokens[at])
            if child is None:
                node = walk.end
                walk.in_completion = not node.turn_end and (node.prompt_end or node.generated)
                walk.beside = next((other.owner for other in node.children.values()), None)
                self._grow(tokens, at, walk, generated=generated, owner=owner)
                return
            most = min(child.stop - child.start, total - at)
            shared = _shared(child.tokens, child.start, tokens, at, most)
            at += shared
            if shared < child.stop - child.start:
                between: PrefixNode[Row] = PrefixNode(  # splits the edge to the child
                    child.tokens, child.start, child.start + shared, generated=child.generated, owner=child.owner
                )
                walk.end.children[child.tokens[child.start]] = between
                child.start += shared
                between.children[child.tokens[child.start]] = child
                walk.end = between
                walk.beside = child.owner
                if at < total:
                    walk.in_completion = child.generated
                    self._grow(tokens, at, walk, generated=generated, owner=owner)
                return
            walk.end = child
            walk.after_turn = walk.after_turn or child.turn_end
            walk.longest = child if child.rows else walk.longest

    def _grow(self, tokens: list[int], at: int, walk: Walk[Row], *, generated: bool, owner: int) -> None:
        leaf: PrefixNode[Row] = PrefixNode(tokens, at, len(tokens), generated=generated, owner=owner)
        walk.end.children[tokens[at]] = leaf
        walk.end = leaf
        walk.fresh = True


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common beginning of two sequences."""
    return _shared(left, 0, right, 0, min(len(left), len(right)))


def _shared(left: Sequence[int], i: int, right: Sequence[int], j: int, most: int) -> int:
    """Return the number of equal tokens from `i` and `j` on, at most `most`, by halving; slices compare fast."""
    if left[i : i + most] == right[j : j + most]:
        return most
    low, high = 0, most - 1
    while low < high:  # the first `low` are equal, `high + 1` are not
        middle = (low + high + 1) // 2
        if left[i + low : i + middle] == right[j + low : j + middle]:
            low = middle
        else:
            high = middle - 1
    return low
