"""The embedded inference engine: the live weights of a policy behind an OpenAI-compatible endpoint on this machine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from agentlightning.engine.chat import ChatFormat
from agentlightning.engine.chat_server import ServerThread, make_app
from agentlightning.engine.decode_thread import DecodeLoop
from agentlightning.engine.grammar import Grammars
from agentlightning.engine.policy_engine import EngineStats
from agentlightning.engine.seeds import ArrivalSeeds, PlaceOf, PlaceSeeds
from agentlightning.engine.service import ChatService, ServedAs

if TYPE_CHECKING:
    from agentlightning.engine.served import ServedModel

ONLY_POLICY: Final = "policy"
"""Model name of a policy without a name."""
_START_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 2.0  # limit for both threads together


class InferenceEngine:
    """Serves a policy while it learns. It listens only on this machine, because it has no authentication.

    It has two threads: one decodes (`decode_thread`), one serves HTTP (`chat_server`). The weights are read in place,
    without a copy: update the policy inside `paused()`. `start` and `stop` belong to one owner; the other methods may
    be called from any thread.
    """

    api_key: None = None
    """None: on loopback, every user of this machine may call."""

    def __init__(
        self,
        policy: ServedModel,
        *,
        model_name: str = ONLY_POLICY,
        max_batch: int = 32,
        max_waiting: int = 256,
        max_new_tokens: int = 512,
        seed: int = 0,
        place_of: PlaceOf | None = None,
    ) -> None:
        """Prepare the engine; it does not listen yet.

        Args:
            model_name: the `model` of requests.
            max_batch: maximum number of completions that are decoded together.
            max_waiting: maximum number of waiting requests; more are rejected with 503 and `Retry-After`.
            max_new_tokens: token limit of requests without a limit.
            seed: seed of requests without one.
            place_of: returns a rollout's position in the run. With it, replies are reproducible: they depend on the
                weights, that position and the request, not on other requests or the time of arrival.

        Raises:
            ValueError: A limit is below 1.
        """
        limits = {"max_batch": max_batch, "max_waiting": max_waiting, "max_new_tokens": max_new_tokens}
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        self.model_name: Final = model_name
        self._policy = policy
        chat_format = ChatFormat(policy.tokenizer)  # each thread has a copy
        self._loop = DecodeLoop(
            policy,
            max_batch=max_batch,
            max_waiting=max_waiting,
            decode=chat_format.copy().text,
            separate=place_of is not None,
        )
        vocabulary: int = policy.model.config.vocab_size
        self._grammars = Grammars(policy.tokenizer, vocabulary, policy.eos_ids)
        self._service = ChatService(
            ServedAs(model_name, policy.eos_ids, vocabulary, policy.context_length, max_new_tokens),
            chat_format.copy(),
            self._loop.submit,
            self._grammars.state,
            ArrivalSeeds(seed) if place_of is None else PlaceSeeds(seed, place_of),
        )
        self._server: ServerThread | None = None

    @property
    def base_url(self) -> str:
        """The address for OpenAI clients: `http://127.0.0.1:PORT/v1`. Available after `start`."""
        if self._server is None:
            raise RuntimeError("the engine is not running: call start() first")
        return self._server.base_url

    def start(self) -> None:
        """Listen and serve; return when the server responds.

        Raises:
            RuntimeError: the engine was started before, or the server does not start.
        """
        if self._server is not None:
            raise RuntimeError("an engine can be started only once; create a new one")
        app = make_app(self._service, self._health)
        self._server = ServerThread(app, "127.0.0.1", patience=_STOP_SECONDS / 4, name="agl-engine")
        self._loop.start()
        try:
            self._server.start(_START_SECONDS)
        except TimeoutError:
            self.stop()
            raise RuntimeError(f"the engine's server did not start within {_START_SECONDS} s") from None

    def stop(self) -> None:
        """End both threads and free the port, within 2 s; requests in progress receive 503. May be called twice."""
        self._loop.stop(_STOP_SECONDS / 2)
        self._grammars.close()
        if self._server is not None:
            self._server.stop(_STOP_SECONDS / 2)

    def paused(self, timeout: float = 30.0) -> AbstractContextManager[None]:
        """Return the block in which the weights may change: no completion is in progress, new requests wait.

        `with engine.paused(): policy.update(...)`
        """
        return self._loop.paused(timeout)

    def stats(self) -> EngineStats:
        """Return totals since the start; the difference of two results gives tokens per second."""
        return self._loop.stats()

    def _health(self) -> dict[str, object]:
        return {"weight_version": self._policy.weight_version, **self._loop.load()}
