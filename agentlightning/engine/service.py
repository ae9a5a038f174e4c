"""Converts requests of the chat API into completions, and completions into replies.

Replies have the format of vLLM: `prompt_token_ids` at the top level and `token_ids` in each choice if the request sets
`return_token_ids`, `logprobs.content[*].logprob` if it sets `logprobs`, and in each choice `stop_reason`, the stop text
or token that ended it. The token ids, and the log-probabilities, include the token that ends the sequence if the model
sampled it. `Completion` explains their distribution.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace

from agentlightning.engine.chat import CALL_CLOSING, CALL_OPENING, ChatFormat, Reply, message_body
from agentlightning.engine.completion import Adjustments, Completion, GrammarState, StopRule
from agentlightning.engine.request import ChatRequest, Constraint, RequestError, parse_request
from agentlightning.engine.seeds import ArrivalSeeds, PlaceSeeds, hash_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedAs:
    """The model behind an endpoint: its name, its vocabulary and its limits."""

    model_name: str
    eos_ids: frozenset[int]
    vocabulary: int
    context_length: int
    max_new_tokens: int
    seed: int = 0
    by: str = ""
    """The algorithm whose client generates, for error messages."""


class ChatService:
    """Serves requests. Belongs to the loop of the server."""

    def __init__(
        self,
        served: ServedAs,
        chat_format: ChatFormat,
        submit: Callable[[Sequence[Completion]], Future[int]],
        grammar_of: Callable[[Constraint], Awaitable[GrammarState]],
        seeds: ArrivalSeeds | PlaceSeeds,
    ) -> None:
        """Prepare the service. `submit` generates, and its future returns the version of the weights; `seeds` are for
        requests without one."""
        self.served = served
        self._format = chat_format
        self._submit = submit
        self._grammar_of = grammar_of
        self._seeds = seeds
        self._noted: set[str] = set()

    async def reply(self, body: object, attempt: str | None = None) -> dict[str, object]:
        """Return the reply to a request. A cancellation ends the completions. `attempt` is the value of the gateway's
        header.

        Raises:
            RequestError: the request is wrong, too long, or cannot be served now.
        """
        request = parse_request(body)
        if request.model != self.served.model_name:
            raise RequestError(
                f"the model {request.model!r} is not served here; use {self.served.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        self._note_fields_without_effect(request)
        prompt_ids = self._format.prompt_ids(request.messages, request.tools, request.template_fields)
        seeding = nullcontext(request.seed) if request.seed is not None else self._seeds.draw(attempt, prompt_ids)
        async with seeding as seed:
            completions = await self._completions(request, prompt_ids, seed)
            try:
                version = await asyncio.wrap_future(self._submit(completions))
            except asyncio.CancelledError:
                for completion in completions:
                    completion.left = True
                raise
        return self._response(request, completions, version)

    async def _completions(self, request: ChatRequest, prompt_ids: list[int], seed: int) -> list[Completion]:
        """Return one completion for each choice."""
        room, requested = self.served.context_length - len(prompt_ids), request.max_new_tokens
        if room < (requested or 1):
            raise RequestError(
                f"the context is {self.served.context_length} tokens; the messages use {len(prompt_ids)} and the "
                f"completion requests {requested or 'at least 1'}",
                param="messages",
                code="context_length_exceeded",
            )
        limit = requested or min(room, self.served.max_new_tokens)
        adjustments = self._adjustments(request, limit)
        grammar = None if request.constraint is None else await self._grammar_of(request.constraint)
        further = random.Random(f"further choices of {seed}")  # the first is drawn as if it were alone
        return [
            Completion(
                prompt_ids,
                limit,
                request.temperature,
                request.top_p,
                seed if index == 0 else further.getrandbits(63),
                adjustments=adjustments,
                stop=_stop_rule(request),
                grammar=None if grammar is None else grammar.fresh(),
                top_logprobs=min(request.top_logprobs, self.served.vocabulary),
            )
            for index in range(request.n)
        ]

    def _adjustments(self, request: ChatRequest, limit: int) -> Adjustments | None:
        adjustments, vocabulary = request.adjustments, self.served.vocabulary
        if adjustments == Adjustments():
            return None
        unknown = [token for token in adjustments.logit_bias if not 0 <= token < vocabulary]
        if unknown:
            text = f"'logit_bias' names the token {unknown[0]}, but the token ids are 0 to {vocabulary - 1}"
            raise RequestError(text, param="logit_bias")
        if adjustments.min_tokens > limit:
            text = f"'min_tokens' must be at most the limit of the completion, {limit}; got {adjustments.min_tokens}"
            raise RequestError(text, param="min_tokens")
        ends = {*self.served.eos_ids, *request.stop_token_ids}
        return replace(adjustments, ends=frozenset(token for token in ends if token < vocabulary))

    def _note_fields_without_effect(self, request: ChatRequest) -> None:
        """Log the name of each field without effect once."""
        names = request.without_effect
        names += [name for name in request.template_fields if not self._format.template_reads(name)]
        names += ["tools"] if request.tools and not self._format.template_reads("tools") else []
        free = request.tools if request.tools and request.constraint is None else []
        names += ["strict"] if any(tool["function"].get("strict") is True for tool in free) else []
        for name in names:
            if name not in self._noted and len(self._noted) < 100:
                self._noted.add(name)
                logger.info("the field %r of a request has no effect with this model and its chat template", name)

    def _response(self, request: ChatRequest, completions: Sequence[Completion], version: int) -> dict[str, object]:
        prompt_ids, tokens = completions[0].prompt_ids, sum(len(one.token_ids) for one in completions)
        response: dict[str, object] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.served.model_name,
            "system_fingerprint": f"agl-w{version}",
            "choices": [self._choice(request, completion, index) for index, completion in enumerate(completions)],
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": tokens,
                "total_tokens": len(prompt_ids) + tokens,
            },
        }
        if request.return_token_ids:
            response["prompt_token_ids"] = list(prompt_ids)
        return response

    def _choice(self, request: ChatRequest, completion: Completion, index: int) -> dict[str, object]:
        text, grammar = self._text(completion), completion.grammar
        reply = Reply(content=text)
        if request.tools is not None:
            reply = self._format.read(text, request.tools, constrained=grammar is not None)
        if request.one_call:  # if calls have no closing tag, several may come before the end
            reply = replace(reply, tool_calls=reply.tool_calls[:1])
        ids = hash_of(completion.seed, completion.prompt_ids) if self._seeds.repeatable else None
        # the limit may have come within a call, or before the grammar was satisfied
        unfinished = CALL_OPENING in (reply.content or "") if grammar is None else not grammar.is_whole
        cut = completion.finish_reason == "length" and unfinished
        choice: dict[str, object] = {
            "index": index,
            "message": message_body(reply, ids),
            "finish_reason": "tool_calls" if reply.tool_calls and not cut else completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "logprobs": self._logprobs(completion) if request.logprobs else None,
        }
        if request.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _text(self, completion: Completion) -> str:
        *earlier, last = completion.token_ids
        if last in self.served.eos_ids:
            return self._format.text(earlier)
        return self._format.text(completion.token_ids) if completion.stopped_text is None else completion.stopped_text

    def _logprobs(self, completion: Completion) -> dict[str, object]:
        def entries(tokens: Sequence[int], logprobs: Sequence[float]) -> list[dict[str, object]]:
            texts = self._format.token_texts(tokens)
            return [
                {"token": text, "logprob": value, "bytes": None} for text, value in zip(texts, logprobs, strict=True)
            ]

        content = entries(completion.token_ids, completion.logprobs)
        for entry, best in zip(content, completion.likeliest or [[]] * len(content), strict=True):
            entry["top_logprobs"] = entries([token for token, _ in best], [value for _, value in best])
        return {"content": content, "refusal": None}


def _stop_rule(request: ChatRequest) -> StopRule | None:
    last_call = CALL_CLOSING if request.one_call and request.constraint is None else None  # a grammar ends by itself
    if not (request.stop or request.stop_token_ids or last_call):
        return None
    least = request.min_tokens
    included = request.include_stop_str_in_output
    return StopRule(tuple(request.stop), frozenset(request.stop_token_ids), included, least, last_call)
