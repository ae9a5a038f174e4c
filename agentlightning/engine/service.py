"""Turns requests of the chat API into completions and completions into replies.

Replies have the form of vLLM's: `prompt_token_ids` at the top and `token_ids` in each choice when the request says
`return_token_ids`, `logprobs.content[*].logprob` when it says `logprobs`, and in each choice `stop_reason`, the stop
text or token that ended it. The token ids include the one that ends the sequence, when the model drew it; its
log-probability is among the others. Which distribution they are of, `Completion` says; what a stop text does to the
tokens, `stopping.py`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace

from agentlightning.engine.chat import ChatFormat, message_body
from agentlightning.engine.completion import Completion
from agentlightning.engine.request.adjustments import Adjustments
from agentlightning.engine.request.fields import RequestError
from agentlightning.engine.request.grammar import Grammars
from agentlightning.engine.request.request import ChatRequest, SamplingFields, parse_request
from agentlightning.engine.request.stopping import StopRule
from agentlightning.engine.request.tool_calls import CALL_CLOSING, CALL_OPENING, Reply
from agentlightning.engine.seeds import ArrivalSeeds, PlaceSeeds, hash_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """What the engine consumed and produced in one call, for comparison with what others recorded.

    Attributes:
        logprobs: natural, one per completion token.
        index: of the choice, where several were asked for.
    """

    response_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    weight_version: int
    index: int = 0


class ChatService:
    """Answers requests. Lives on the loop of the server."""

    def __init__(
        self,
        chat_format: ChatFormat,
        submit: Callable[[Sequence[Completion]], Future[int]],
        grammars: Grammars,
        record: deque[CallRecord],
        *,
        model_name: str,
        eos_ids: frozenset[int],
        vocabulary: int,
        context_length: int,
        max_new_tokens: int,
        seeds: ArrivalSeeds | PlaceSeeds,
    ) -> None:
        self._format = chat_format
        self._submit = submit
        self._grammars = grammars
        self._record = record
        self.model_name = model_name
        self._eos_ids = eos_ids
        self._vocabulary = vocabulary
        self._context_length = context_length
        self._max_new_tokens = max_new_tokens
        self._seeds = seeds  # of requests that bring none
        self._noted: set[str] = set()

    async def reply(self, body: object, attempt: str | None = None) -> dict[str, object]:
        """Return the reply to a request. Cancelled, it ends the completions. `attempt` is what the gateway says of who
        asks.

        Raises:
            RequestError: The request is wrong, too long, or cannot be served at the moment.
        """
        request = parse_request(body)
        if request.model != self.model_name:
            raise RequestError(
                f"the model {request.model!r} is not served here, only {self.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        self._note_fields_without_effect(request)
        prompt_ids = self._format.prompt_ids(request.messages, request.tools, request.template_fields)
        if request.seed is not None:
            drawn = nullcontext(request.seed)
        else:
            drawn = self._seeds.draw(attempt, await self._seeds.place(attempt), prompt_ids)
        with drawn as seed:
            completions = await self._completions(request, prompt_ids, seed)
            try:
                weight_version = await asyncio.wrap_future(self._submit(completions))
            except asyncio.CancelledError:
                for completion in completions:
                    completion.left = True
                raise
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        for index, done in enumerate(completions):
            prompt_ids = list(done.prompt_ids)
            record = CallRecord(response_id, prompt_ids, done.token_ids, done.logprobs, weight_version, index)
            self._record.append(record)
        return self._response(request, completions, response_id, weight_version)

    async def _completions(self, request: ChatRequest, prompt_ids: list[int], seed: int) -> list[Completion]:
        """Return what is to be decoded: one completion for each choice."""
        left, wanted = self._context_length - len(prompt_ids), request.max_new_tokens
        if left < (wanted or 1):
            raise RequestError(
                f"the context is {self._context_length} tokens; the messages take {len(prompt_ids)} of them and "
                f"{wanted or 'at least 1'} are asked for the completion",
                param="messages",
                code="context_length_exceeded",
            )
        limit = wanted or min(left, self._max_new_tokens)
        adjustments = self._adjustments(request, limit)
        grammar = None if request.constraint is None else await self._grammars.state(request.constraint)
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
                top_logprobs=min(request.top_logprobs, self._vocabulary),
            )
            for index in range(request.n)
        ]

    def _adjustments(self, request: ChatRequest, limit: int) -> Adjustments | None:
        sampling = request.sampling
        if sampling == SamplingFields():
            return None
        beyond = [token for token in sampling.logit_bias if not 0 <= token < self._vocabulary]
        if beyond:
            text = f"'logit_bias' names the token {beyond[0]}; the tokens are 0 to {self._vocabulary - 1}"
            raise RequestError(text, param="logit_bias")
        if sampling.min_tokens > limit:
            text = f"'min_tokens' must be at most the limit of the completion, {limit}; got {sampling.min_tokens}"
            raise RequestError(text, param="min_tokens")
        ends = frozenset(token for token in self._eos_ids | request.stop_token_ids if token < self._vocabulary)
        return Adjustments(**asdict(sampling), ends=ends)

    def _note_fields_without_effect(self, request: ChatRequest) -> None:
        """Say once of each such field that it came."""
        names = list(request.without_effect)
        names += [name for name in request.template_fields if not self._format.template_reads(name)]
        names += ["tools"] if request.tools and not self._format.template_reads("tools") else []
        free = request.tools if request.tools and request.constraint is None else []
        names += ["strict"] if any(tool["function"].get("strict") is True for tool in free) else []
        for name in names:
            if name not in self._noted and len(self._noted) < 100:
                self._noted.add(name)
                logger.info("the field %r of requests has no effect on this model and its chat template", name)

    def _response(
        self, request: ChatRequest, completions: Sequence[Completion], response_id: str, weight_version: int
    ) -> dict[str, object]:
        prompt_ids, tokens = completions[0].prompt_ids, sum(len(one.token_ids) for one in completions)
        choices = [self._choice(request, completion, index) for index, completion in enumerate(completions)]
        response: dict[str, object] = {
            "id": response_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model_name,
            "system_fingerprint": f"agl-w{weight_version}",
            "choices": choices,
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
        text = self._text(completion)
        constrained = completion.grammar is not None
        tools = request.tools
        reply = Reply(content=text) if tools is None else self._format.read(text, tools, constrained=constrained)
        if request.one_call:  # where a call has no closing tag of its own, several may have come before the end
            reply = replace(reply, tool_calls=reply.tool_calls[:1])
        ids = hash_of(completion.seed, completion.prompt_ids) if self._seeds.repeatable else None
        cut = completion.finish_reason == "length" and _is_unfinished(completion, reply)
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
        token_ids = completion.token_ids
        if token_ids[-1] in self._eos_ids:
            return self._format.text(token_ids[:-1])
        if completion.finish_reason == "stop" and completion.stop is not None:
            return completion.stop.cut(token_ids, self._format.text)
        return self._format.text(token_ids)

    def _logprobs(self, completion: Completion) -> dict[str, object]:
        likeliest = completion.likeliest or [[]] * len(completion.token_ids)
        content = [
            {
                "token": text,
                "logprob": logprob,
                "bytes": None,
                "top_logprobs": [
                    {"token": other, "logprob": value, "bytes": None}
                    for other, (_, value) in zip(self._format.token_texts([t for t, _ in best]), best, strict=True)
                ],
            }
            for text, logprob, best in zip(
                self._format.token_texts(completion.token_ids), completion.logprobs, likeliest, strict=True
            )
        ]
        return {"content": content, "refusal": None}


def _stop_rule(request: ChatRequest) -> StopRule | None:
    last_call = CALL_CLOSING if request.one_call and request.constraint is None else None  # a grammar ends by itself
    if not (request.stop or request.stop_token_ids or last_call):
        return None
    least = request.sampling.min_tokens
    return StopRule(request.stop, request.stop_token_ids, request.include_stop, least, last_call)


def _is_unfinished(completion: Completion, reply: Reply) -> bool:
    """True if the limit came within a call, or before the grammar was satisfied."""
    if completion.grammar is not None:
        return not completion.grammar.is_whole
    return CALL_OPENING in (reply.content or "")
