"""`Chat` calls a model, with retries, limits and a bill."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.base.field_help import explain_fields
from agentlightning.base.process_secrets import secret
from agentlightning.chat.bill import Bill, BillLine, Limits
from agentlightning.chat.budget import CHARACTERS_PER_TOKEN, Budget, Price, characters_of
from agentlightning.chat.sources import Answer, CallFault, HttpSource, Source, source_of
from agentlightning.errors import BadRequestError, ServiceError
from agentlightning.utils.backoff import backoff_delay
from agentlightning.utils.concurrency.loops import within

logger = logging.getLogger(__name__)

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0
_OPENAI = "https://api.openai.com/v1"
_NO_SOURCE = (
    "No model is configured: set OPENAI_API_KEY (and OPENAI_BASE_URL for a server other than OpenAI's), or pass a "
    "source: an agl.LLM, a client such as openai.AsyncOpenAI(), a callable (messages, **settings) -> text, or an "
    "llm_proxy with models to the Trainer"
)


class ChatError(ServiceError):
    """A model call failed, after all useful retries."""


@explain_fields
@dataclass(frozen=True, slots=True)
class ChatReply:
    """The reply of a model, and its cost."""

    text: str
    """Text of the message; empty if the model returned none."""
    model: str
    """Name of the model from the server, otherwise from the request."""
    prompt_tokens: int
    """Number of prompt tokens as counted by the server, otherwise a quarter of the characters."""
    completion_tokens: int
    """Number of completion tokens, counted likewise."""
    cost: float | None
    """Cost in the currency of the prices; None if the model has no price."""
    seconds: float
    """Seconds until the reply arrived, including waiting and retries."""
    finish_reason: str | None = None
    """Finish reason from the server; `length` means that the text was truncated."""


class Chat:
    """Calls a model: for critics, editors and judges, whose calls are not the agent's.

    May be used from any number of event loops and threads, and pickled; no connection is kept open. Its bill and its
    limits apply to this object in this process.

    Args:
        source: the model server. None uses the server in `OPENAI_API_KEY` and `OPENAI_BASE_URL`; otherwise an `LLM`, a
            client object with `chat.completions.create` (sync or async), or a callable `(messages, **settings)` that
            returns a text or an OpenAI-shaped reply (sync or async).
        model: the default model of calls; None uses that of the `LLM`.
        temperature: the default temperature of calls; None uses the server's default.
        concurrency: maximum number of concurrent calls per event loop.
        retries: maximum number of retries after a temporary failure: no response, 408, 409, 425, 429, 500 and above.
            The pause is that of `Retry-After`, otherwise it grows with each retry.
        timeout_seconds: timeout of one request, in seconds.
        limits: see `Limits`; also a dict of its fields.
        prices: prices by model, as `(prompt, completion)` per million tokens.

    Raises:
        TypeError, BadRequestError: an argument is invalid. The message describes valid values.
    """

    def __init__(
        self,
        source: object = None,
        *,
        model: str | None = None,
        temperature: float | None = None,
        concurrency: int = 4,
        retries: int = 3,
        timeout_seconds: float = 120.0,
        limits: Limits | Mapping[str, Any] | None = None,
        prices: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        if concurrency < 1 or retries < 0 or not 0 < timeout_seconds < math.inf:
            raise BadRequestError(
                "Chat requires concurrency of at least 1, retries of at least 0 and timeout_seconds above 0; got "
                f"{concurrency}, {retries}, {timeout_seconds}"
            )
        self.source: Source | None = None if source is None else source_of(source)
        self.model, self.temperature = model, temperature
        self.concurrency, self.retries, self.timeout_seconds = concurrency, retries, timeout_seconds
        self.budget = Budget(Limits.of(limits))
        self.prices = _check_prices(prices)
        if self.limits.cost is not None and not self.prices:
            raise BadRequestError(
                f"limits={{'cost': {self.limits.cost:g}}} requires prices: pass prices={{model: (prompt, "
                "completion)}, per million tokens"
            )
        self._runs = set[str]()
        """Runs with earlier costs on the bill."""
        self._reset()

    def _reset(self) -> None:
        self._slots = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()
        self._paused_until = 0.0

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name not in ("_slots", "_paused_until")}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._reset()

    @property
    def bill(self) -> Bill:
        """Use of its calls so far."""
        return self.budget.bill

    @property
    def limits(self) -> Limits:
        """Limits on its calls."""
        return self.budget.limits

    # --- limits --------------------------------------------------------------------------------------------------

    def start(self, spent: Bill | None = None, *, run: str = "") -> None:
        """Start the time of the limits, and add `spent`, the use by earlier processes.

        The use of a named `run` is added only at its first start; later starts are already on this bill.
        """
        self.budget.start()
        with self.budget.lock:
            if spent is not None and run not in self._runs:
                self.bill.lines[:] = spent.merge(self.bill).lines
            if run:
                self._runs.add(run)

    def at(self, source: object) -> Chat:
        """Return a chat for another source, with the settings, the limits and the bill of this one."""
        self.start()
        other = copy.copy(self)  # shares the budget
        other.source, other._slots = source_of(source), self._slots
        return other

    def check_limits(self) -> None:
        """Check that a call may be made.

        Raises:
            LimitReached: a limit is used up. The message names it.
        """
        self.budget.check()

    def check_prices(self, *models: str) -> None:
        """Check that models have a price, for a limit on cost.

        Raises:
            BadRequestError: a model has no price.
        """
        if unknown := [model for model in dict.fromkeys(models) if model not in self.prices]:
            prices = ", ".join(f"{model!r}: (prompt, completion)" for model in unknown)
            raise BadRequestError(
                f"The limit on cost requires a price for {', '.join(map(repr, unknown))}: pass prices={{{prices}}}, "
                "per million tokens"
            )

    def check_source(self) -> Source:
        """Return the source; the default is the server in the environment variables.

        Raises:
            BadRequestError: no source is configured.
        """
        if self.source is not None:
            return self.source
        base, key = os.environ.get("OPENAI_BASE_URL"), os.environ.get("OPENAI_API_KEY") or secret("OPENAI_API_KEY")
        if not (key or base):
            raise BadRequestError(_NO_SOURCE)
        return HttpSource(base or _OPENAI, key, None)

    def model_asked(self, model: str | None = None) -> str:
        """Return the model of a call with this `model` argument.

        Raises:
            BadRequestError: no source or no model is configured.
        """
        model_name = model or self.model or self.check_source().model
        if model_name is None:
            raise BadRequestError("No model is set. Pass ask(model=...) or Chat(model=...)")
        return model_name

    def seconds_left(self) -> float:
        """Return the remaining seconds of the limit; infinite without one."""
        return self.budget.seconds_left()

    def calls_left(self, *models: str | None) -> float:
        """Return the number of calls to these models that fit into the limits, each as long as the longest so far."""
        fields = getattr(self.check_source(), "sampling", {})
        names = {self.model_asked(model) for model in models}
        return min(self.budget.calls_left(model, fields, self.prices.get(model)) for model in names)

    # --- calls ---------------------------------------------------------------------------------------------------

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        model: str | None = None,
        temperature: float | None = None,
        purpose: str = "critique",
        settings: Mapping[str, Any] | None = None,
        bill: Bill | None = None,
    ) -> ChatReply:
        """Return the model's reply to the messages; a string is one user message.

        `settings` are additional fields of the request, such as `max_tokens`. The use of the call is also added to
        `bill`, under `purpose`.

        Raises:
            ChatError: the call failed. The message has the last response of the server.
            LimitReached: a limit is used up.
            BadRequestError: no source or no model is configured, or a limit on cost is set but the model has no price.
        """
        source, model_name = self.check_source(), self.model_asked(model)
        if self.limits.cost is not None:
            self.check_prices(model_name)
        prompt = [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(m) for m in messages]
        temperature = self.temperature if temperature is None else temperature
        fields = {**(settings or {}), **({} if temperature is None else {"temperature": temperature})}
        price, characters = self.prices.get(model_name), characters_of(prompt)
        line, began, mark = BillLine(purpose, model_name, cost=None if price is None else 0.0), time.monotonic(), None
        with self.budget.lock:
            slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))
        try:
            async with slots:
                request = {**getattr(source, "sampling", {}), **fields}
                mark = await self.budget.reserve(model_name, prompt, request, price)
                answer = await self._with_retries(source, model_name, prompt, fields, line)
            line.calls, line.failed_calls = 1, 0
            line.prompt_tokens = _tokens(answer.prompt_tokens, characters)
            line.completion_tokens = _tokens(answer.completion_tokens, len(answer.text))
            if price is not None:
                line.cost = price.of(line.prompt_tokens, line.completion_tokens)
        finally:
            line.seconds = time.monotonic() - began
            self.budget.settle(mark, line, characters)
            if bill is not None:
                bill.add(line)
        tokens = line.prompt_tokens, line.completion_tokens
        return ChatReply(
            answer.text, answer.model or model_name, *tokens, line.cost, line.seconds, answer.finish_reason
        )

    async def _with_retries(
        self, source: Source, model: str, messages: list[dict[str, Any]], fields: Mapping[str, Any], line: BillLine
    ) -> Answer:
        """Return the answer; until then the line counts the call as failed, and each further request as a retry."""
        while True:
            if (pause := self._paused_until - time.monotonic()) > 0:  # the server requested a pause
                await asyncio.sleep(min(pause, max(0.0, self.seconds_left())))
            self.budget.count_request()
            line.retries += line.failed_calls
            line.failed_calls = 1
            seconds = min(self.timeout_seconds, self.seconds_left())
            try:
                return await within(seconds, source.ask(model, messages, fields))
            except TimeoutError:
                self.check_limits()
                fault = CallFault(f"{model or 'The callable'} did not respond within {seconds:g} s", final=False)
            except CallFault as error:
                fault = error
            if fault.final or line.retries >= self.retries:
                times = f" {line.requests} times; the last error:" if line.retries else ""
                raise ChatError(f"The model call failed{times}: {fault}") from fault
            delay = backoff_delay(line.requests, _FIRST_DELAY, _LONGEST_DELAY)
            if fault.retry_after is not None:
                if fault.retry_after > max(self.timeout_seconds, _LONGEST_DELAY):
                    raise ChatError(f"The server requires a wait of {fault.retry_after:g} s: {fault}") from fault
                delay = fault.retry_after
                self._paused_until = max(self._paused_until, time.monotonic() + delay)
            logger.warning("a request to %s failed; retrying in %.1f s: %s", model, delay, fault)
            await asyncio.sleep(min(delay, max(0.0, self.seconds_left())))


def _tokens(count: int | None, characters: int) -> int:
    return math.ceil(characters / CHARACTERS_PER_TOKEN) if count is None else count


def _check_prices(prices: Mapping[str, Sequence[float]] | None) -> dict[str, Price]:
    checked = dict[str, Price]()
    for model, price in (prices or {}).items():
        try:
            prompt, completion = map(float, price)
        except (TypeError, ValueError):
            prompt = completion = math.nan
        if not (0 <= prompt < math.inf and 0 <= completion < math.inf):
            raise BadRequestError(
                f"prices[{model!r}] must be (prompt, completion), two numbers of at least 0 per million tokens; got "
                f"{price!r}"
            )
        checked[model] = Price(prompt, completion)
    return checked
