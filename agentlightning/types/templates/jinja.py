"""Prompt templates of the engine `jinja`: Jinja's sandbox, with limits on a template's output and work.

The sandbox prevents a template from reading attributes that expose other objects. It does not prevent
`'a' * 300000000`, `|center(300000000)`, nested lists that print as gigabytes, or nested loops. So each rendering has a
budget: the characters that it reads and writes and the steps of its loops and macros are counted in advance (see
`counting.py`). Only those methods of built-in values are available that cannot grow a value beyond the counted size.

The limits do not apply to your own objects: iterating over them or calling their methods runs your code. Pass plain
values to a template.
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
"""Largest length of a template in characters."""
MOST_TOKENS = 50_000
"""Largest number of names, numbers, operators and strings in a template. It limits the cost of compilation."""
MOST_BITS = 4096
"""Largest size in bits of an integer that a template computes."""
_MOST_RANGE = 2**60
"""Largest number of a range. Above it, a template could create many numbers with the same hash."""
_WIDEST = 10_000
_SLOW_CHARACTERS = 64 * 1024
"""Longest value for filters that take more than linear time."""
_WIDENING = frozenset(("center", "indent", "wordwrap", "batch", "slice", "round", "tojson", "ljust", "rjust", "zfill"))
_SORTING = frozenset(("sort", "dictsort", "groupby"))
_PRODUCT = frozenset(("rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip", "trim"))
"""Methods that can compare every character of the value with every character of the argument."""
# fmt: off
_COMPARING = frozenset((
    "in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le",
    "lower", "upper",
))
# fmt: on
"""Tests that take time in proportion to their arguments."""
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
        jinja2.UndefinedError: the value of a placeholder is missing.
        jinja2.TemplateError: the template is invalid, or uses something that the sandbox forbids.
        ValueError: the template exceeds a limit of this module.
    """
    if len(template) > MOST_TEMPLATE:
        raise ValueError(f"The template has {len(template)} characters; at most {MOST_TEMPLATE} are rendered")
    environment = _Bounded(undefined=StrictUndefined)
    environment.check_tokens(template)
    try:
        return environment.from_string(template).render(**values)
    except RecursionError as error:
        raise ValueError("The template is nested too deeply, or has an endless recursion") from error
    except MemoryError as error:  # Python's compiler raises it for deep nesting, too
        raise ValueError("The template needs more memory than is available") from error


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
        """Return the entry with that name if the object is a dict that has it, else a value that raises on use."""
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
        """Return a filter that charges its input and output."""
        start = 1 if hasattr(call, "jinja_pass_arg") else 0

        def run(*args: object, **kwargs: object) -> object:
            values = args[start:]
            weight = self.budget.spend(*values, *kwargs.values())
            if name in _SLOW and weight > _SLOW_CHARACTERS:
                raise ValueError(f"The filter {name} accepts values of at most {_SLOW_CHARACTERS} characters")
            self._check_growth(name, values[0] if values else "", values[1:], kwargs)
            result = call(*args, **kwargs)
            if is_sequence(result):
                self.budget.charge(len(result))
            return self.budget.watched(cast("Iterator[object]", result)) if isinstance(result, Iterator) else result

        return functools.update_wrapper(run, call)

    def _guarded_test(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        """Return a test that charges the values that it compares."""
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
                raise ValueError(f"The test {name!r} accepts only numbers")  # on a text, % is string formatting
            return call(*args, **kwargs)

        return functools.update_wrapper(run, call)

    def _check_growth(self, name: str, value: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Charge the output of a filter or method beyond the size of its input."""
        values = (*args, *kwargs.values())
        numbers = [abs(number) for number in values if isinstance(number, int)]
        texts = [len(text) for text in values if isinstance(text, str)]
        if name == "round" and is_sequence(value):
            raise ValueError("The filter 'round' accepts only numbers")
        if name in _WIDENING:
            if any(number > _WIDEST for number in numbers):
                bits = max(numbers).bit_length()
                raise ValueError(f"{name} accepts numbers up to {_WIDEST}; got a number of {bits} bits")
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
            raise ValueError("The filter 'sum' accepts only numbers; use a loop to join lists")

    # --- compilation -------------------------------------------------------------------------------------------------

    def check_tokens(self, template: str) -> None:
        """Check that the template has at most `MOST_TOKENS` tokens."""
        for count, _ in enumerate(self.lex(template)):
            if count > MOST_TOKENS:
                raise ValueError(f"The template has more than {MOST_TOKENS} names, operators and strings")

    @override
    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return cast(nodes.Template, CountingVisitor(self).visit(super()._parse(source, name, filename)))


def _bounded_range(*args: int) -> range:
    """Return the sandbox's range, with an additional limit on its numbers."""
    if any(abs(number) > _MOST_RANGE for number in args):
        raise ValueError(f"range accepts numbers up to {_MOST_RANGE}")
    return safe_range(*args)


def _grows(obj: object, attribute: str) -> bool:
    """Return True for a method of a built-in value that can return more than its input."""
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
            raise ValueError("A % format of the template takes its width from a value (*); write the width as a number")
        check_widths(match[1], "A % format of the template")
