"""Limit the work of one rendering of a jinja template: its budget, and the filters that charge it."""

from __future__ import annotations

import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sized, ValuesView
from typing import Any, TypeGuard, cast

from jinja2 import Environment, nodes, pass_context
from jinja2.runtime import Context
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from agentlightning.types.templates.fstring import MOST_CHARACTERS

MOST_WORK = 40_000_000
"""Characters that one rendering may read, compare and write; an entry of a list counts `ENTRY`, a filter, test,
comparison or method `CALL`, a step of a loop or a call of a macro `STEP`: 100,000 steps, about two seconds."""
STEP, CALL, ENTRY = 400, 40, 32
MOST_SECONDS = 20.0
"""Largest processor time of one rendering in seconds, for work that is not counted. Checked with the charges."""
_BETWEEN_LOOKS = 20_000
"""Characters charged between two checks of the time; each check is a system call."""
_TURN = "agentlightning_step"
_JOINED = "agentlightning_concatenation"
_COMPARED = "agentlightning_comparison"
_SOUGHT = "agentlightning_membership"
_SLICED = "agentlightning_slice"


class Budget:
    """The remaining work of one rendering."""

    def __init__(self) -> None:
        self._remaining = self._looks_at = MOST_WORK
        self._end = time.thread_time() + MOST_SECONDS

    def charge(self, amount: int) -> None:
        """Subtract an amount of work from the budget."""
        self._remaining -= amount
        if self._remaining < 0:
            raise ValueError(
                f"The template needs more work than {MOST_WORK} characters and steps; shorten its loops or values"
            )
        if self._remaining > self._looks_at:
            return
        if time.thread_time() > self._end:
            raise ValueError(f"The template takes longer than {MOST_SECONDS:g} s of processor time")
        self._looks_at = self._remaining - _BETWEEN_LOOKS

    def weight(self, value: object) -> int:
        """Return the number of characters and entries of a value; a nested list counts each time it is printed.

        Raises:
            ValueError: the number is larger than the budget.
        """
        total = 0
        pending: list[object] = [value]
        while pending:
            part = pending.pop()
            total += 1
            if isinstance(part, Namespace):
                pending.append(cast("dict[str, object]", object.__getattribute__(part, "_Namespace__attrs")))
            elif isinstance(part, (dict, list, tuple, set, frozenset, ItemsView, KeysView, ValuesView)):
                total += len(cast("Sized", part)) * ENTRY
                if total > self._remaining:
                    self.charge(total)
                pending.extend(cast("Iterable[object]", part))
                if isinstance(part, dict):
                    pending.extend(cast("dict[object, object]", part).values())
            elif isinstance(part, (str, bytes, bytearray)):
                total += len(cast("Sized", part))
            elif isinstance(part, range):
                total += len(part) * ENTRY
            elif isinstance(part, int):
                total += part.bit_length() // 3
            if total > self._remaining:
                self.charge(total)
        return total

    def spend(self, *values: object) -> int:
        """Charge the weight of values and return it."""
        total = CALL + sum(self.weight(value) for value in values)
        self.charge(total)
        return total

    def step(self, value: object) -> bool:
        self.charge(STEP)
        return True

    def compared(self, value: object) -> object:
        self.spend(value)
        return value

    def sought(self, value: object) -> object:
        """Return the container of a membership test. A dict or set is not charged, because a lookup reads one entry."""
        return cast("object", value) if isinstance(value, (dict, set, frozenset)) else self.compared(value)

    def sliced(self, value: object) -> object:
        self.charge(CALL + (len(value) if is_sequence(value) else 0))
        return value

    def watched(self, values: Iterator[object]) -> Iterator[object]:
        """Yield the items of a filter's output, and charge each one when it is requested."""
        for value in values:
            self.charge(ENTRY + self.weight(value))
            yield value

    def weighed(self, value: object) -> object:
        if not isinstance(value, str):
            self.spend(value)
        return value

    def joined(self, parts: Iterable[object]) -> str:
        texts: list[str] = []
        length = 0
        for part in parts:
            text = str(self.weighed(part))
            length += len(text)
            self.charge(len(text))
            if length > MOST_CHARACTERS:
                raise ValueError(f"The rendered prompt is longer than {MOST_CHARACTERS} characters")
            texts.append(text)
        return "".join(texts)


def is_sequence(value: object) -> TypeGuard[Sized]:
    """Return True for values that `*` and `+` can make longer."""
    return isinstance(value, (str, bytes, bytearray, list, tuple))


def counting_filters(budget: Budget) -> dict[str, Callable[..., Any]]:
    """Return the filters that `CountingVisitor` inserts into a template."""
    filters = {_TURN: budget.step, _COMPARED: budget.compared, _SOUGHT: budget.sought, _SLICED: budget.sliced}
    return {**{name: _passing_context(step) for name, step in filters.items()}, _JOINED: budget.joined}


def _passing_context(step: Callable[[object], object]) -> Callable[..., Any]:
    """Mark a filter as one that needs the context, so that Jinja does not run it at compile time."""

    @pass_context
    def counted(context: Context, value: object) -> object:
        return step(value)

    return counted


class CountingVisitor(NodeTransformer):
    """Insert a step at the beginning of every body that can run repeatedly, and replace `~` by its counting form."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(nodes.List(node.nodes, lineno=node.lineno, environment=self._environment), _JOINED, node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._filter(node.expr, _COMPARED, node)
        for operand in node.ops:
            name = _SOUGHT if operand.op in ("in", "notin") else _COMPARED
            operand.expr = self._filter(operand.expr, name, node)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = self._filter(node.key, _COMPARED, node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):  # compiled to Python's slice, which skips the environment's `getitem`
            node.node = self._filter(node.node, _SLICED, node)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._count(node)
        if node.test is not None:
            step = self._step(node)
            node.test = nodes.And(step, node.test, lineno=node.lineno, environment=self._environment)
        return node

    def _count(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._step(node), lineno=node.lineno, environment=self._environment))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _count

    def _step(self, node: nodes.Node) -> nodes.Expr:
        return self._filter(nodes.Const(None, lineno=node.lineno, environment=self._environment), _TURN, node)

    def _filter(self, value: nodes.Expr, name: str, node: nodes.Node) -> nodes.Filter:
        return nodes.Filter(value, name, [], [], None, None, lineno=node.lineno, environment=self._environment)
