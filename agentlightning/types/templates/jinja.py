"""Prompt templates of the engine `jinja`: Jinja's sandbox, with bounds on a template's output and work.

The sandbox keeps a template away from attributes that lead out of a value. It does not keep it from `'a' * 300000000`,
`|center(300000000)`, lists within lists that print as gigabytes, or loops within loops. Here each rendering has a
budget: the characters that it reads and writes, and the steps of its loops and macros, are counted in advance (see
`counting.py`). Of the methods of built-in values, only those that cannot grow a value beyond the counted size are
available.

A loop over the caller's values, and a method of the caller's object, run like the caller's own code:
give a template plain values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sized
from types import BuiltinMethodType, MethodType
from typing import Any, cast

from jinja2 import StrictUndefined, nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from typing_extensions import override

from agentlightning.types.templates.counting import CALL, Budget, CountingVisitor, counting_filters, is_sequence
from agentlightning.types.templates.fstring import MOST_CHARACTERS, check_widths

MOST_TEMPLATE = 1024 * 1024
"""Characters of a template."""
MOST_TOKENS = 50_000
"""Names, numbers, signs and texts of a template, which bound the cost of its compilation."""
MOST_BITS = 4096
"""Bits of an integer that a template computes."""
_MOST_RANGE = 2**60
"""Largest number of a range: beyond it, numbers can be chosen that all have the same hash."""
_WIDEST = 10_000
_SLOW_CHARACTERS = 64 * 1024
"""Longest value for filters whose time grows faster than their input."""
_WIDENING = frozenset(("center", "indent", "wordwrap", "batch", "slice", "round", "tojson", "ljust", "rjust", "zfill"))
_SORTING = frozenset(("sort", "dictsort", "groupby"))
_PRODUCT = frozenset(("rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip", "trim"))
"""Methods that may compare every character of the value with every one of the argument."""
# fmt: off
_COMPARING = frozenset((
    "in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le",
    "lower", "upper",
))
# fmt: on
"""Tests whose time grows with their arguments."""
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


def render(template: str, values: Mapping[str, object]) -> str:
    """Return the template rendered with these values.

    Raises:
        jinja2.UndefinedError: it names a value that was not given.
        jinja2.TemplateError: it is not a template, or uses something that the sandbox forbids.
        ValueError: it needs more than the bounds of this module.
    """
    if len(template) > MOST_TEMPLATE:
        raise ValueError(f"The template has {len(template)} characters; at most {MOST_TEMPLATE} are rendered")
    environment = _Bounded(undefined=StrictUndefined)
    environment.check_tokens(template)
    try:
        return environment.from_string(template).render(**values)
    except RecursionError as error:
        raise ValueError("The template is nested too deeply, or calls itself without end") from error
    except MemoryError as error:  # Python's compiler raises it for deep nesting, too
        raise ValueError("The template needs more memory than there is") from error


class _Bounded(ImmutableSandboxedEnvironment):
    """The sandbox of one rendering, with its budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%", "//", "-"))

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.budget = Budget()
        self.globals.pop("lipsum")
        self.filters.pop("attr")
        filters = {name: self._guarded(name, call) for name, call in self.filters.items()}
        self.filters.update(filters)
        self.tests.update({name: self._guarded_test(name, call) for name, call in self.tests.items()})
        self.globals.update(range=cast("Any", _bounded_range))
        self.filters.update(counting_filters(self.budget))
        self.concat = self.budget.joined
        self.finalize = self.budget.weighed  # Jinja turns what this returns into text

    # --- operations of a template ------------------------------------------------------------------------------------

    @override
    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if operator == "%" and isinstance(left, (str, bytes)):
            _check_printf(left)
            self.budget.spend(left, right)
        elif operator == "*" and (is_sequence(left) or is_sequence(right)):
            sequence, times = (left, right) if is_sequence(left) else (right, left)
            if isinstance(times, int):
                self.budget.charge(CALL + max(0, len(cast("Sized", sequence)) * times))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MOST_BITS:
                raise ValueError(f"The template computes an integer of more than {MOST_BITS} bits ({operator})")
            self.budget.charge(CALL)
        elif is_sequence(left) and is_sequence(right):
            self.budget.charge(CALL + len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    @override
    def getattr(self, obj: object, attribute: str) -> object:
        return self._refused(obj, attribute) if _grows(obj, attribute) else super().getattr(obj, attribute)

    @override
    def getitem(self, obj: object, argument: object) -> object:
        self.budget.charge(CALL)
        if is_sequence(argument) and not isinstance(argument, str):  # the hash of a tuple reads all of it
            self.budget.spend(argument)
        if isinstance(argument, str) and _grows(obj, argument):
            return self._refused(obj, argument)
        return super().getitem(obj, argument)

    def _refused(self, obj: object, attribute: str) -> object:
        """Return the entry of that name if the object is a dict that has one, else a value that raises on use."""
        if isinstance(obj, dict) and attribute in obj:
            return cast("dict[str, object]", obj)[attribute]
        return self.unsafe_undefined(obj, attribute)

    @override
    def call(__self, __context: Context, __obj: Any, *args: object, **kwargs: object) -> object:
        owner = cast("object", __obj.__self__) if isinstance(__obj, BuiltinMethodType) else None
        if isinstance(owner, _BUILTINS):
            __self._check_growth(__obj.__name__, cast("object", owner), args, kwargs)
            __self.budget.spend(cast("object", owner), *args, *kwargs.values())
        elif __obj is dict or (isinstance(__obj, MethodType) and isinstance(__obj.__self__, LoopContext)):
            __self.budget.spend(*args, *kwargs.values())  # `loop.changed` compares
        result = super().call(__context, __obj, *args, **kwargs)
        if is_sequence(result):
            __self.budget.charge(len(result))
        return result

    def _guarded(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        """Return a filter whose input and output are charged."""
        start = 1 if hasattr(call, "jinja_pass_arg") else 0

        def run(*args: object, **kwargs: object) -> object:
            values = args[start:]
            weight = self.budget.spend(*values, *kwargs.values())
            if name in _SLOW and weight > _SLOW_CHARACTERS:
                raise ValueError(f"The filter {name} takes values of at most {_SLOW_CHARACTERS} characters")
            self._check_growth(name, values[0] if values else "", values[1:], kwargs)
            result = call(*args, **kwargs)
            if is_sequence(result):
                self.budget.charge(len(result))
            return self.budget.watched(cast("Iterator[object]", result)) if isinstance(result, Iterator) else result

        return functools.update_wrapper(run, call)

    def _guarded_test(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        """Return a test whose compared values are charged."""
        start = 1 if hasattr(call, "jinja_pass_arg") else 0

        def run(*args: object, **kwargs: object) -> object:
            values = (*args[start:], *kwargs.values())
            if name == "in":
                self.budget.compared(values[0])
                for value in values[1:]:
                    self.budget.sought(value)
            elif name in _COMPARING:
                self.budget.spend(*values)
            else:
                self.budget.charge(CALL)
            if name in _REMAINDERS and isinstance(values[0], (str, bytes, bytearray)):
                raise ValueError(f"The test {name} takes numbers")  # on a text, % is string formatting
            return call(*args, **kwargs)

        return functools.update_wrapper(run, call)

    def _check_growth(self, name: str, value: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Charge the output of a filter or method beyond the size of its input."""
        values = (*args, *kwargs.values())
        numbers = [abs(number) for number in values if isinstance(number, int)]
        texts = [len(text) for text in values if isinstance(text, str)]
        if name == "round" and is_sequence(value):
            raise ValueError("The filter round takes numbers")
        if name in _WIDENING:
            if any(number > _WIDEST for number in numbers):
                raise ValueError(f"{name} takes numbers up to {_WIDEST}; got {max(numbers).bit_length()} bits")
            by = max([*numbers, *texts, 1])
            self.budget.charge(by * (_lines(value) if name in ("indent", "wordwrap") else 1))
            if name == "tojson":
                self.budget.charge(by * self.budget.weight(value))
        elif name in _SORTING:
            self.budget.charge(3 * self.budget.weight(value))
        elif name in _PRODUCT and is_sequence(value):
            self.budget.charge(len(value) * max([len(each) for each in values if is_sequence(each)] or [0]))
        elif name == "replace" and len(values) >= 2:
            old, new = str(values[0]), str(values[1])
            self.budget.charge(str(value).count(old) * len(new))
        elif name == "join":
            parts, between = (values[0], value) if isinstance(value, str) and values else (value, None)
            count = len(cast("Sized", parts)) if isinstance(parts, Sized) else MOST_CHARACTERS // 100
            self.budget.charge(count * max([len(between) if isinstance(between, str) else 0, *texts, 0]))
        elif name == "format":
            _check_printf(str(value))
        elif name == "sum" and any(is_sequence(start) and not isinstance(start, str) for start in values):
            raise ValueError("The filter sum adds numbers; for lists use a loop")

    # --- compilation -------------------------------------------------------------------------------------------------

    def check_tokens(self, template: str) -> None:
        """Check that the template does not have more tokens than may be compiled."""
        for count, _ in enumerate(self.lex(template)):
            if count > MOST_TOKENS:
                raise ValueError(f"The template has more than {MOST_TOKENS} names, signs and texts")

    @override
    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return cast(nodes.Template, CountingVisitor(self).visit(super()._parse(source, name, filename)))


def _bounded_range(*args: int) -> range:
    """Return the sandbox's range, with a bound on its numbers, too."""
    if any(abs(number) > _MOST_RANGE for number in args):
        raise ValueError(f"range takes numbers up to {_MOST_RANGE}")
    return safe_range(*args)


def _grows(obj: object, attribute: str) -> bool:
    """Return True for a method of a built-in value that may make more than it was given."""
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
    for match in _PRINTF.finditer(shown):
        if "*" in match[1]:
            raise ValueError("A template's % takes no width from its values (*); write the width out")
        check_widths(match[1], "A % of the template")
