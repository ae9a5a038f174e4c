"""The chat endpoint over a client that takes and gives tokens: what the gateway calls when another system serves the
model, such as VERL or Tinker.

`ChatService` renders calls as in every run of ours and reads the replies; the client generates.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from typing_extensions import override

from agentlightning.algorithm.grpo.engine.app import make_app
from agentlightning.algorithm.grpo.engine.chat import ChatFormat
from agentlightning.algorithm.grpo.engine.completion import Completion
from agentlightning.algorithm.grpo.engine.request.constraint import Constraint
from agentlightning.algorithm.grpo.engine.request.fields import RequestError
from agentlightning.algorithm.grpo.engine.request.grammar import Grammars, GrammarState
from agentlightning.algorithm.grpo.engine.seeds import ArrivalSeeds
from agentlightning.algorithm.grpo.engine.service import ChatService
from agentlightning.utils.http.allowed_hosts import AllowedHosts, HostDoor
from agentlightning.utils.http.auth import BearerAuth
from agentlightning.utils.http.protocol import HttpBounds
from agentlightning.utils.http.uvicorn_server import AsgiServer

_PATIENCE: Final = 1.0
_START_SECONDS: Final = 20.0


@dataclass(frozen=True)
class ServedAs:
    """The model behind an endpoint: its name, its vocabulary and its bounds."""

    model_name: str
    eos_ids: frozenset[int]
    vocabulary: int
    context_length: int
    max_new_tokens: int
    seed: int
    by: str
    """The algorithm whose client generates, for error messages."""


class ChatServer:
    """Serves on a thread of its own. To be made on the loop on which the client lives.

    Attributes:
        base_url: where the gateway sends calls. Known after `start`.
    """

    def __init__(self, client: Any, tokenizer: Any, served: ServedAs, *, token: str | None) -> None:
        """Prepare it; nothing listens yet.

        Args:
            client: has `async generate(request_id=, prompt_ids=, sampling_params=)`, whose result has `token_ids`,
                `log_probs` (natural, one for each), and the version of the weights in `extra_fields["global_steps"]`.
            token: what calls must carry; None: nothing.
        """
        chat_format = ChatFormat(tokenizer)
        submitter = _Submitter(client, chat_format, served)
        service = ChatService(
            chat_format.copy(),
            submitter.submit,
            _NoGrammars(tokenizer, served),
            deque(maxlen=1),
            model_name=served.model_name,
            eos_ids=served.eos_ids,
            vocabulary=served.vocabulary,
            context_length=served.context_length,
            max_new_tokens=served.max_new_tokens,
            seeds=ArrivalSeeds(served.seed),
        )
        self._app = BearerAuth(make_app(service, dict), token, lambda scope: False)
        self._server: AsgiServer | None = None
        self.base_url = ""

    async def start(self, host: str) -> None:
        """Listen on a free port of an address of this machine; returns when calls are answered.

        Raises:
            TimeoutError: the server did not come up.
        """
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((host, 0))
        listener.listen(1024)
        app = HostDoor(self._app, AllowedHosts.of(host, host, None), same_origin=True)
        server = self._server = AsgiServer(app, patience=_PATIENCE, bounds=HttpBounds(), log_level=logging.WARNING)
        threading.Thread(target=server.run, args=([listener],), name="agl-chat", daemon=True).start()
        await asyncio.to_thread(server.ready.result, _START_SECONDS)
        name = f"[{host}]" if ":" in host else host
        self.base_url = f"http://{name}:{listener.getsockname()[1]}/v1"

    def stop(self) -> None:
        """End it."""
        if self._server is not None:
            self._server.request_stop()


def _not_served(by: str, param: str | None = None) -> RequestError:
    return RequestError(
        f"{by} serves temperature, top_p, max_tokens, n and stop; it does not serve response_format, required "
        "tools, penalties, logit_bias, min_tokens and top_logprobs",
        param=param,
        code="unsupported_parameter",
    )


class _NoGrammars(Grammars):
    """Refuses constrained replies before a grammar is compiled, whether or not its library is installed."""

    def __init__(self, tokenizer: Any, served: ServedAs) -> None:
        super().__init__(tokenizer, served.vocabulary, served.eos_ids)
        self._by = served.by

    @override
    async def state(self, constraint: Constraint) -> GrammarState:
        raise _not_served(self._by, constraint.param)


class _Submitter:
    """Has completions generated by the client. `submit` may be called from any thread."""

    def __init__(self, client: Any, chat_format: ChatFormat, served: ServedAs) -> None:
        self._client, self._eos_ids, self._by = client, served.eos_ids, served.by
        self._decode = chat_format.text
        self._loop = asyncio.get_running_loop()

    def submit(self, completions: Sequence[Completion]) -> Future[int]:
        """Begin the completions of a call; the result is the version of the weights that answered.

        Raises:
            RequestError: what is asked would be drawn from another distribution than the one that learns.
        """
        for one in completions:
            if one.grammar is not None or one.adjustments is not None or one.top_logprobs:
                raise _not_served(self._by)
        return asyncio.run_coroutine_threadsafe(self._all(completions), self._loop)

    async def _all(self, completions: Sequence[Completion]) -> int:
        tasks = [asyncio.ensure_future(self._one(completion)) for completion in completions]
        try:
            return min(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, completion: Completion) -> int:
        sampling: dict[str, Any] = {
            "temperature": completion.temperature,
            "top_p": completion.top_p,
            "max_tokens": completion.max_new_tokens,
            "logprobs": True,
        }
        found = await self._client.generate(
            request_id=uuid4().hex, prompt_ids=list(completion.prompt_ids), sampling_params=sampling
        )
        if not found.token_ids:
            raise RequestError(f"the engine of {self._by} gave no token", status=503, code="no_token", retry_after=1)
        ids, logprobs = list(found.token_ids), list(found.log_probs or ())
        if len(ids) != len(logprobs):
            text = f"the engine of {self._by} gave {len(ids)} tokens and {len(logprobs)} log-probabilities"
            raise RequestError(text, status=500, code="no_logprobs")
        rule, end = completion.stop, len(ids)
        if rule is not None:
            for count in range(1, len(ids) + 1):
                if (hit := rule.hit(ids[:count], self._decode)) is not None:
                    end, completion.stop_reason = count, hit.reason
                    break
        stopped = completion.stop_reason is not None or end < len(ids) or ids[end - 1] in self._eos_ids
        completion.token_ids[:], completion.logprobs[:] = ids[:end], logprobs[:end]
        completion.finish_reason = "stop" if stopped else "length"
        return int(found.extra_fields.get("global_steps") or 0)
