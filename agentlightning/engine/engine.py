"""The embedded inference engine: the live weights of a policy behind an OpenAI-compatible endpoint on this machine."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections import deque
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from agentlightning.engine.app import make_app
from agentlightning.engine.chat import ChatFormat
from agentlightning.engine.decode_thread import DecodeLoop, EngineStats
from agentlightning.engine.request.grammar import Grammars
from agentlightning.engine.seeds import ArrivalSeeds, PlaceOf, PlaceSeeds
from agentlightning.engine.service import CallRecord, ChatService
from agentlightning.utils.http.allowed_hosts import AllowedHosts, HostDoor
from agentlightning.utils.http.protocol import HttpBounds
from agentlightning.utils.http.uvicorn_server import AsgiServer

if TYPE_CHECKING:
    from agentlightning.engine.served import ServedModel

ONLY_POLICY: Final = "policy"
"""Model name of a policy without a name."""
_START_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 2.0  # for both threads together


class InferenceEngine:
    """Serves a policy while it learns.

    Two threads of its own: one decodes (`decode_loop`), one serves HTTP (`engine_app`). The weights are read in place,
    so a swap copies nothing: update the policy inside `swap()`. `start` and `stop` belong to one owner; the rest may
    be called from any thread.

    Attributes:
        record: the latest calls as the engine saw them, oldest first, `record_size` at most.
    """

    def __init__(
        self,
        policy: ServedModel,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model_name: str = ONLY_POLICY,
        max_batch: int = 32,
        max_waiting: int = 256,
        max_new_tokens: int = 512,
        record_size: int = 1024,
        seed: int = 0,
        threads: int | None = None,
        place_of: PlaceOf | None = None,
    ) -> None:
        """Prepare the engine; nothing listens yet.

        Args:
            port: 0 takes a free one.
            max_batch: completions that are decoded together.
            max_waiting: requests that may wait beside; more are refused with 503 and `Retry-After`.
            max_new_tokens: for requests that name no limit.
            seed: of the requests that bring no seed.
            threads: of torch while decoding; None: one for a small model, else torch's own setting.
            place_of: gives a rollout's place in the run. With it replies are repeatable: they depend on the weights,
                that place and the request, not on what else is in flight or when it arrives.

        Raises:
            ValueError: The host is not this machine's loopback (the engine has no authentication), or a limit is
                below 1.
        """
        if not ipaddress.ip_address(host).is_loopback:
            raise ValueError(
                f"the embedded engine has no authentication and serves loopback only, not {host}; "
                "put the gateway (LLMProxy) in front of it for other machines"
            )
        for name, value in {
            "max_batch": max_batch,
            "max_waiting": max_waiting,
            "max_new_tokens": max_new_tokens,
        }.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.record: deque[CallRecord] = deque(maxlen=record_size)
        self._policy = policy
        self._address = (host, port)
        chat_format = ChatFormat(policy.tokenizer)  # of which each thread has a copy
        self._loop = DecodeLoop(
            policy,
            max_batch=max_batch,
            max_waiting=max_waiting,
            threads=threads,
            decode=chat_format.copy().text,
            separate=place_of is not None,
        )
        vocabulary: int = policy.model.config.vocab_size
        self._grammars = Grammars(policy.tokenizer, vocabulary, policy.eos_ids)
        self._service = ChatService(
            chat_format.copy(),
            self._loop.submit,
            self._grammars,
            self.record,
            model_name=model_name,
            eos_ids=policy.eos_ids,
            vocabulary=vocabulary,
            context_length=policy.context_length,
            max_new_tokens=max_new_tokens,
            seeds=ArrivalSeeds(seed) if place_of is None else PlaceSeeds(seed, place_of),
        )
        self._socket: socket.socket | None = None
        self._server: AsgiServer | None = None
        self._server_thread: threading.Thread | None = None

    @property
    def model_name(self) -> str:
        """What requests must ask for as `model`."""
        return self._service.model_name

    @property
    def api_key(self) -> None:
        """None: on loopback anybody of this machine may call."""
        return None

    @property
    def base_url(self) -> str:
        """Where OpenAI clients point: `http://127.0.0.1:PORT/v1`. Known after `start`."""
        if self._socket is None:
            raise RuntimeError("the engine is not running: call start() first")
        host, port = self._socket.getsockname()[:2]
        return f"http://{host}:{port}/v1"

    def start(self) -> None:
        """Listen and serve; returns when requests are answered.

        Raises:
            OSError: The port is taken.
            RuntimeError: The engine was started before, or the server does not come up.
        """
        if self._server is not None:
            raise RuntimeError("an engine is started once; make a new one")
        self._socket = _listen(*self._address)
        host = self._address[0]
        app = HostDoor(make_app(self._service, self._health), AllowedHosts.of(host, host, None), same_origin=True)
        self._server = AsgiServer(app, patience=_STOP_SECONDS / 4, bounds=HttpBounds(), log_level=logging.WARNING)
        self._server_thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="agl-engine", daemon=True
        )
        self._loop.start()
        self._server_thread.start()
        try:
            self._server.ready.result(_START_SECONDS)
        except TimeoutError:
            self.stop()
            raise RuntimeError(f"the engine's server did not start within {_START_SECONDS} s") from None

    def stop(self) -> None:
        """End both threads and free the port, within 2 s; what is in flight gets 503. May be called twice."""
        self._loop.stop(_STOP_SECONDS / 2)
        self._grammars.close()
        if self._server is None or self._server_thread is None or self._socket is None:
            return
        self._server.request_stop()
        self._server_thread.join(_STOP_SECONDS / 2)
        self._server.force_exit = True
        self._socket.close()

    def swap(self, timeout: float = 30.0) -> AbstractContextManager[None]:
        """Return the block in which the weights may change: nothing is in flight, new requests wait.

        `with engine.swap(): policy.update(...)`

        Raises (on entering the block):
            TimeoutError: Something was still in flight after `timeout` seconds.
            RuntimeError: Another swap is open.
        """
        return self._loop.swap(timeout)

    def stats(self) -> EngineStats:
        """Return sums since the start; the difference of two gives tokens per second."""
        return self._loop.stats()

    def _health(self) -> dict[str, object]:
        return {"weight_version": self._policy.weight_version, **self._loop.load()}


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"cannot listen on {host}:{port} ({error.strerror}); port 0 takes a free one"
        ) from error
    listener.listen(1024)
    return listener
