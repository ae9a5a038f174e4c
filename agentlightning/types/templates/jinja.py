"""Prompt templates of the engine `jinja`: Jinja's sandbox, with bounds on what a template may make and how long.

The sandbox keeps a template away from attributes that lead out of a value. It does not keep it from `'a' * 300000000`,
`|center(300000000)`, lists within lists that print as gigabytes, or loops within loops. Here each rendering has a
budget: characters that it reads and makes, and steps of its loops and macros, are counted before they are made. Of the
methods of built-in values only those that cannot grow a value beyond what is counted are offered.

A loop over what the caller gave, and a method of an object that the caller gave, run as the caller's own code would:
give a template plain values.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sized, ValuesView
from types import BuiltinMethodType, MethodType
from typing import Any, TypeGuard, cast

from jinja2 import StrictUndefined, nodes, pass_context
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from typing_extensions import override

from agentlightning.types.templates.fstring import MOST_CHARACTERS, check_widths

MOST_TEMPLATE = 1024 * 1024
"""Characters of a template."""
MOST_TOKENS = 50_000
"""Names, numbers, signs and texts of a template: what its compilation costs."""
MOST_WORK = 40_000_000
"""Characters that one rendering may read, compare and make; an entry of a list counts `ENTRY`, a filter, test,
comparison or method `CALL`, a step of a loop or a call of a macro `STEP`: 100,000 steps, about two seconds."""
STEP, CALL, ENTRY = 400, 40, 32
MOST_SECONDS = 20.0
"""Processor seconds of one rendering, looked at with the charges: the last net, for what no count sees."""
_BETWEEN_LOOKS = 20_000
"""Characters charged between two looks at the time: a look is a system call."""
MOST_BITS = 4096
"""Of an integer that a template computes."""
_MOST_RANGE = 2**60
"""Largest number of a range: beyond it numbers can be chosen whose hashes are all the same."""
_WIDEST = 10_000
_SLOW_CHARACTERS = 64 * 1024
"""Longest value for filters whose time grows faster than their input."""
_WIDENING = frozenset(("center", "indent", "wordwrap", "batch", "slice", "round", "tojson", "ljust", "rjust", "zfill"))
_SORTING = frozenset(("sort", "dictsort", "groupby"))
_PRODUCT = frozenset(("rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip", "trim"))
"""They may compare every character of the value with every one of the argument."""
# fmt: off
_COMPARING = frozenset((
    "in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le",
    "lower", "upper",
))
# fmt: on
"""Tests whose time grows with what they are given."""
_REMAINDERS = frozenset(("odd", "even", "divisibleby"))
_SLOW = frozenset(("wordwrap", "urlize", "striptags", "xmlattr", "pprint"))
_BUILTINS = (str, bytes, bytearray, int, float, complex, list, tuple, dict, set, frozenset, type)
# fmt: off
_METHODS = frozenset((
    "capitalize", "casefold", "center", "copy", "count", "difference", "endswith", "find", "get", "index",
    "intersection", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isdisjoint", "isidentifier",
    "is_integer", "islower", "isnumeric", "isprintable", "isspace", "issubset", "issuperset", "istitle",
    "isupper", "items", "join", "keys", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
    "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith",
    "strip", "swapcase", "title", "union", "upper", "values", "zfill", "bit_length",
))
# fmt: on
_PRINTF = re.compile(r"%(?:\([^)]*\))?([-+ #0-9.*hlL]*)")
_TURN = "agentlightning_step"
_JOINED = "agentlightning_concatenation"
_COMPARED = "agentlightning_comparison"
_SOUGHT = "agentlightning_membership"
_SLICED = "agentlightning_slice"


def render(template: str, values: Mapping[str, object]) -> str:
    """Return the template rendered with these values.

    Raises:
        jinja2.UndefinedError: it names something that was not given.
        jinja2.TemplateError: it is no template, or reaches for what the sandbox keeps from it.
        ValueError: it asks for more than the bounds of this module.
    """
    if len(template) > MOST_TEMPLATE:
        raise ValueError(f"The template has {len(template)} characters; at most {MOST_TEMPLATE} are rendered")
    environment = _Bounded(undefined=StrictUndefined)
    environment.check_tokens(template)
    try:
        return environment.from_string(template).render(**values)
    except RecursionError as error:
        raise ValueError("The template is nested too deeply, or calls itself without end") from error
    except MemoryError as error:  # also what Python's compiler says of deep nesting
        raise ValueError("The template needs more memory than there is") from error


class _Bounded(ImmutableSandboxedEnvironment):
    """The sandbox of one rendering, with its budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%", "//", "-"))

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self._left = self._looks_at = MOST_WORK
        self._end = time.thread_time() + MOST_SECONDS
        self.globals.pop("lipsum")
        self.filters.pop("attr")
        guarded = {name: self._guarded(name, call) for name, call in self.filters.items()}
        self.filters.update(guarded)
        self.tests.update({name: self._guarded_test(name, call) for name, call in self.tests.items()})
        self.globals.update(range=cast("Any", _bounded_range))
        self.filters[_TURN] = _passing_context(self._step)
        self.filters[_COMPARED] = _passing_context(self._compared)
        self.filters[_SOUGHT] = _passing_context(self._sought)
        self.filters[_SLICED] = _passing_context(self._sliced)
        self.filters[_JOINED] = self._joined
        self.concat = self._joined
        self.finalize = self._weighed  # Jinja turns what this returns into text

    # --- the budget --------------------------------------------------------------------------------------------------

    def charge(self, amount: int) -> None:
        """Take an amount of work from the budget."""
        self._left -= amount
        if self._left < 0:
            raise ValueError(
                f"The template asks for more work than {MOST_WORK} characters and steps; shorten its loops or values"
            )
        if self._left > self._looks_at:
            return
        if time.thread_time() > self._end:
            raise ValueError(f"The template takes longer than {MOST_SECONDS:g} s of processor time")
        self._looks_at = self._left - _BETWEEN_LOOKS

    def weight(self, value: object) -> int:
        """Return how many characters and entries a value has, those of lists within lists each time they would print.

        Raises:
            ValueError: more than the budget.
        """
        total = 0
        waiting: list[object] = [value]
        while waiting:
            part = waiting.pop()
            total += 1
            if isinstance(part, Namespace):
                waiting.append(_attributes(part))
            elif isinstance(part, (dict, list, tuple, set, frozenset, ItemsView, KeysView, ValuesView)):
                total += len(cast("Sized", part)) * ENTRY
                if total > self._left:
                    self.charge(total)
                waiting.extend(_entries(cast("object", part)))
            elif isinstance(part, (str, bytes, bytearray)):
                total += len(cast("Sized", part))
            elif isinstance(part, range):
                total += len(part) * ENTRY
            elif isinstance(part, int):
                total += part.bit_length() // 3
            if total > self._left:
                self.charge(total)
        return total

    def _spend(self, *values: object) -> int:
        """Charge the weight of values and return it."""
        total = CALL + sum(self.weight(value) for value in values)
        self.charge(total)
        return total

    def _step(self, value: object) -> bool:
        self.charge(STEP)
        return True

    def _compared(self, value: object) -> object:
        self._spend(value)
        return value

    def _sought(self, value: object) -> object:
        """Return what something is looked for in; a table is not read through for that."""
        return cast("object", value) if isinstance(value, (dict, set, frozenset)) else self._compared(value)

    def _sliced(self, value: object) -> object:
        self.charge(CALL + (len(value) if _is_sequence(value) else 0))
        return value

    def _watched(self, values: Iterator[object]) -> Iterator[object]:
        """Yield what a filter makes one by one, each charged when it is asked for."""
        for value in values:
            self.charge(ENTRY + self.weight(value))
            yield value

    def _weighed(self, value: object) -> object:
        if not isinstance(value, str):
            self._spend(value)
        return value

    def _joined(self, parts: Iterable[object]) -> str:
        texts: list[str] = []
        length = 0
        for part in parts:
            text = str(self._weighed(part))
            length += len(text)
            self.charge(len(text))
            if length > MOST_CHARACTERS:
                raise ValueError(f"The rendered prompt is longer than {MOST_CHARACTERS} characters")
            texts.append(text)
        return "".join(texts)

    # --- what a template may do --------------------------------------------------------------------------------------

    @override
    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if operator == "%" and isinstance(left, (str, bytes)):
            _check_printf(left)
            self._spend(left, right)
        elif operator == "*" and (_is_sequence(left) or _is_sequence(right)):
            sequence, times = (left, right) if _is_sequence(left) else (right, left)
            if isinstance(times, int):
                self.charge(CALL + max(0, len(cast("Sized", sequence)) * times))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MOST_BITS:
                raise ValueError(f"The template computes an integer of more than {MOST_BITS} bits ({operator})")
            self.charge(CALL)
        elif _is_sequence(left) and _is_sequence(right):
            self.charge(CALL + len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    @override
    def getattr(self, obj: object, attribute: str) -> object:
        return self._refused(obj, attribute) if _grows(obj, attribute) else super().getattr(obj, attribute)

    @override
    def getitem(self, obj: object, argument: object) -> object:
        self.charge(CALL)
        if _is_sequence(argument) and not isinstance(argument, str):  # the hash of a tuple reads all of it
            self._spend(argument)
        if isinstance(argument, str) and _grows(obj, argument):
            return self._refused(obj, argument)
        return super().getitem(obj, argument)

    def _refused(self, obj: object, attribute: str) -> object:
        """Return an entry of that name, where a dict has one; else what raises when it is used."""
        if isinstance(obj, dict) and attribute in obj:
            return cast("dict[str, object]", obj)[attribute]
        return self.unsafe_undefined(obj, attribute)

    @override
    def call(__self, __context: Context, __obj: Any, *args: object, **kwargs: object) -> object:
        owner = cast("object", __obj.__self__) if isinstance(__obj, BuiltinMethodType) else None
        if isinstance(owner, _BUILTINS):
            __self._check_growth(__obj.__name__, cast("object", owner), args, kwargs)
            __self._spend(cast("object", owner), *args, *kwargs.values())
        elif __obj is dict or (isinstance(__obj, MethodType) and isinstance(__obj.__self__, LoopContext)):
            __self._spend(*args, *kwargs.values())  # `loop.changed` compares
        result = super().call(__context, __obj, *args, **kwargs)
        if _is_sequence(result):
            __self.charge(len(result))
        return result

    def _guarded(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        """Return a filter that is charged for what it is given and gives."""
        skipped = 1 if hasattr(call, "jinja_pass_arg") else 0

        def run(*args: object, **kwargs: object) -> object:
            given = args[skipped:]
            weight = self._spend(*given, *kwargs.values())
            if name in _SLOW and weight > _SLOW_CHARACTERS:
                raise ValueError(f"The filter {name} takes values of at most {_SLOW_CHARACTERS} characters")
            self._check_growth(name, given[0] if given else "", given[1:], kwargs)
            result = call(*args, **kwargs)
            if _is_sequence(result):
                self.charge(len(result))
            return self._watched(cast("Iterator[object]", result)) if isinstance(result, Iterator) else result

        return functools.update_wrapper(run, call)

    def _guarded_test(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        """Return a test that is charged for what it compares."""
        skipped = 1 if hasattr(call, "jinja_pass_arg") else 0

        def run(*args: object, **kwargs: object) -> object:
            given = (*args[skipped:], *kwargs.values())
            if name == "in":
                self._compared(given[0])
                for value in given[1:]:
                    self._sought(value)
            elif name in _COMPARING:
                self._spend(*given)
            else:
                self.charge(CALL)
            if name in _REMAINDERS and isinstance(given[0], (str, bytes, bytearray)):
                raise ValueError(f"The test {name} takes numbers")  # of a text, % fills in
            return call(*args, **kwargs)

        return functools.update_wrapper(run, call)

    def _check_growth(self, name: str, value: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Charge what a filter or method may make beyond what it is given."""
        given = (*args, *kwargs.values())
        numbers = [abs(number) for number in given if isinstance(number, int)]
        texts = [len(text) for text in given if isinstance(text, str)]
        if name == "round" and _is_sequence(value):
            raise ValueError("The filter round takes numbers")
        if name in _WIDENING:
            if any(number > _WIDEST for number in numbers):
                raise ValueError(f"{name} takes numbers up to {_WIDEST}; got {max(numbers).bit_length()} bits")
            by = max([*numbers, *texts, 1])
            self.charge(by * (_lines(value) if name in ("indent", "wordwrap") else 1))
            if name == "tojson":
                self.charge(by * self.weight(value))
        elif name in _SORTING:
            self.charge(3 * self.weight(value))
        elif name in _PRODUCT and _is_sequence(value):
            self.charge(len(value) * max([len(each) for each in given if _is_sequence(each)] or [0]))
        elif name == "replace" and len(given) >= 2:
            old, new = str(given[0]), str(given[1])
            self.charge(str(value).count(old) * len(new))
        elif name == "join":
            parts, between = (given[0], value) if isinstance(value, str) and given else (value, None)
            count = len(cast("Sized", parts)) if isinstance(parts, Sized) else MOST_CHARACTERS // 100
            self.charge(count * max([len(between) if isinstance(between, str) else 0, *texts, 0]))
        elif name == "format":
            _check_printf(str(value))
        elif name == "sum" and any(_is_sequence(start) and not isinstance(start, str) for start in given):
            raise ValueError("The filter sum adds numbers; for lists use a loop")

    # --- what is compiled --------------------------------------------------------------------------------------------

    def check_tokens(self, template: str) -> None:
        """Check that the template has no more tokens than one may compile."""
        for count, _ in enumerate(self.lex(template)):
            if count > MOST_TOKENS:
                raise ValueError(f"The template has more than {MOST_TOKENS} names, signs and texts")

    @override
    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return cast(nodes.Template, _Counting(self).visit(super()._parse(source, name, filename)))


class _Counting(NodeTransformer):
    """Puts a step at the beginning of every body that may run again, and the guarded form in the place of `~`."""

    def __init__(self, environment: _Bounded) -> None:
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
        if isinstance(node.arg, nodes.Slice):  # compiled to Python's own, past the environment's `getitem`
            node.node = self._filter(node.node, _SLICED, node)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._count(node)
        if node.test is not None:
            step = self._step(node)
            node.test = nodes.And(step, node.test, lineno=node.lineno, environment=self._environment)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._count(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._count(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._count(node)

    def _count(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._step(node), lineno=node.lineno, environment=self._environment))
        return node

    def _step(self, node: nodes.Node) -> nodes.Expr:
        return self._filter(nodes.Const(None, lineno=node.lineno, environment=self._environment), _TURN, node)

    def _filter(self, value: nodes.Expr, name: str, node: nodes.Node) -> nodes.Filter:
        return nodes.Filter(value, name, [], [], None, None, lineno=node.lineno, environment=self._environment)


def _is_sequence(value: object) -> TypeGuard[Sized]:
    """True for what `*` and `+` make longer."""
    return isinstance(value, (str, bytes, bytearray, list, tuple))


def _entries(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        entries = cast("dict[object, object]", value)
        yield from entries
        yield from entries.values()
    else:
        yield from cast("Iterable[object]", value)


def _attributes(namespace: Namespace) -> dict[str, object]:
    return cast("dict[str, object]", object.__getattribute__(namespace, "_Namespace__attrs"))


def _bounded_range(*args: int) -> range:
    """Return the sandbox's range, with a bound on its numbers, too."""
    if any(abs(number) > _MOST_RANGE for number in args):
        raise ValueError(f"range takes numbers up to {_MOST_RANGE}")
    return safe_range(*args)


def _passing_context(step: Callable[[object], object]) -> Callable[..., Any]:
    """Mark a filter as one that needs the context, which keeps Jinja from running it when it compiles."""

    @pass_context
    def counted(context: Context, value: object) -> object:
        return step(value)

    return counted


def _grows(obj: object, attribute: str) -> bool:
    """True for a method of a built-in value that may make more than it was given."""
    if not isinstance(obj, _BUILTINS) or attribute in _METHODS:
        return False
    kinds: tuple[type[object], ...] = type(cast("object", obj)).__mro__
    builtin = next((cls for cls in kinds if cls in _BUILTINS), object)
    return isinstance(obj, type) or callable(getattr(builtin, attribute, None))


def _lines(value: object) -> int:
    return str(value).count("\n") + 1 if isinstance(value, str) else 1


def _check_printf(text: str | bytes) -> None:
    """Check the widths of a `%` template."""
    shown = text if isinstance(text, str) else text.decode("latin-1")
    for found in _PRINTF.finditer(shown):
        if "*" in found[1]:
            raise ValueError("A template's % takes no width from its values (*); write the width out")
        check_widths(found[1], "A % of the template")
