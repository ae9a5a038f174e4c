"""The use of model calls, by purpose and model, and its limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from agentlightning.base.field_help import explain_fields
from agentlightning.base.terminal import counted
from agentlightning.errors import BadRequestError, ServiceError


class LimitReached(ServiceError):
    """A limit on model calls is reached. No more calls are made."""

    def __init__(self, what: str, spent: float, bound: float, needed: float = 0.0) -> None:
        need = f", and the next call may need {needed:g}" if needed else ""
        super().__init__(
            f"The limit on {what} is reached: {spent:g} of {bound:g} used{need}. Raise limits={{{what!r}: ...}}"
        )
        self.what, self.spent, self.bound, self.needed = what, spent, bound, needed

    @override
    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.spent, self.bound, self.needed)


@explain_fields
@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the total use of model calls; None is no limit.

    Raises:
        BadRequestError: a limit is not a number above 0.
    """

    calls: int | None = None
    """Number of requests, including retries."""
    tokens: int | None = None
    """Tokens of prompts and completions. A call is made if its prompt and its `max_tokens` fit in addition to the calls
    in progress. Without `max_tokens`, it runs alone unless a reply of 8192 tokens, or four times the longest so far,
    also fits; the limit is then exceeded at most by the excess of the last reply over the longest one before."""
    seconds: float | None = None
    """Seconds since the first call, or since `Chat.start`."""
    cost: float | None = None
    """Cost in the currency of the prices, checked like `tokens`. Each called model must have a price."""

    def __post_init__(self) -> None:
        for name, bound in dataclasses.asdict(self).items():
            number = isinstance(bound, (int, float)) and not isinstance(bound, bool) and 0 < bound < math.inf
            if bound is not None and not number:
                raise BadRequestError(f"limits: {name} must be a number above 0, or None; got {bound!r}")

    @classmethod
    def of(cls, limits: Limits | Mapping[str, Any] | None) -> Limits:
        """Return limits from a dict of its fields, an object of this class, or None.

        Raises:
            BadRequestError: the value is none of these, or has an unknown field.
        """
        if limits is None or isinstance(limits, Limits):
            return limits or cls()
        names = [each.name for each in dataclasses.fields(cls)]
        if not isinstance(limits, Mapping) or any(name not in names for name in limits):
            raise BadRequestError(f"limits must be agl.Limits(...) or a dict with {', '.join(names)}; got {limits!r}")
        return cls(**limits)


@explain_fields
@dataclass(slots=True)
class BillLine:
    """The calls for one purpose to one model."""

    purpose: str
    """Purpose of the calls, such as `critique`."""
    model: str
    """Name of the model in the request; empty if the request had none."""
    calls: int = 0
    """Number of successful calls."""
    failed_calls: int = 0
    """Number of failed calls."""
    retries: int = 0
    """Number of retries of these calls."""
    prompt_tokens: int = 0
    """Prompt tokens as counted by the server, otherwise a quarter of the characters; also for completions."""
    completion_tokens: int = 0
    seconds: float = 0.0
    """Total seconds of all calls, including waiting and retries."""
    cost: float | None = 0.0
    """Cost in the currency of the prices; None if the model has no price."""

    @property
    def requests(self) -> int:
        """Number of all requests that were sent."""
        return self.calls + self.failed_calls + self.retries

    def add(self, other: BillLine) -> None:
        """Add the numbers of another line."""
        for name in ("calls", "failed_calls", "retries", "prompt_tokens", "completion_tokens", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.cost = None if self.cost is None or other.cost is None else self.cost + other.cost


@explain_fields
@dataclass(slots=True)
class Bill:
    """The use of calls. Not thread-safe; `Chat` protects its own bill."""

    lines: list[BillLine] = field(default_factory=list[BillLine])
    """One line for each purpose and model, in the order of their first call."""

    def add(self, *lines: BillLine) -> None:
        """Add to the lines of the same purpose and model."""
        for line in lines:
            for existing in self.lines:
                if (existing.purpose, existing.model) == (line.purpose, line.model):
                    existing.add(line)
                    break
            else:
                self.lines.append(dataclasses.replace(line))

    def merge(self, *others: Bill) -> Bill:
        """Return a bill with the sums of this bill and others."""
        result = Bill()
        result.add(*(line for bill in (self, *others) for line in bill.lines))
        return result

    @property
    def calls(self) -> int:
        """Number of successful calls."""
        return sum(line.calls for line in self.lines)

    @property
    def failed_calls(self) -> int:
        """Number of failed calls."""
        return sum(line.failed_calls for line in self.lines)

    @property
    def retries(self) -> int:
        """Number of retries of these calls."""
        return sum(line.retries for line in self.lines)

    @property
    def requests(self) -> int:
        """Number of all requests that were sent, which `Limits.calls` limits."""
        return sum(line.requests for line in self.lines)

    @property
    def prompt_tokens(self) -> int:
        return sum(line.prompt_tokens for line in self.lines)

    @property
    def completion_tokens(self) -> int:
        return sum(line.completion_tokens for line in self.lines)

    @property
    def tokens(self) -> int:
        """Number of tokens of prompts and completions."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def seconds(self) -> float:
        """Total seconds of all calls."""
        return sum(line.seconds for line in self.lines)

    @property
    def cost(self) -> float | None:
        """Cost in the currency of the prices; None if a called model has no price."""
        costs = [line.cost for line in self.lines]
        return None if None in costs else sum(cost for cost in costs if cost is not None)

    def as_json(self) -> list[dict[str, Any]]:
        """Return the lines as JSON data."""
        return [dataclasses.asdict(line) for line in self.lines]

    @classmethod
    def from_json(cls, lines: Iterable[Mapping[str, Any]]) -> Bill:
        """Return the bill from the result of its `as_json`."""
        return cls([BillLine(**line) for line in lines])

    @override
    def __str__(self) -> str:
        cost = "" if self.cost is None else f", cost {self.cost:.4f}" if self.cost else ""
        failed = f", {self.failed_calls} failed" if self.failed_calls else ""
        retries = f", {counted(self.retries, 'retry')}" if self.retries else ""
        tokens = f"{self.prompt_tokens} + {counted(self.completion_tokens, 'token')}"
        return f"{counted(self.calls, 'call')}{failed}{retries}, {tokens}{cost}"
