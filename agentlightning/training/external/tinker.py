"""A run that the Tinker service trains. The service learns and samples, and is accessed through its own client.

The gateway reaches it through a server in this process. Every wait has a time limit, and every error names its request.
The client itself retries a request if the connection is lost or the service is busy; this module does not retry.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from uuid import uuid4

import tinker
from typing_extensions import override

from agentlightning.base.private_files import private_folder
from agentlightning.engine.chat_server import ChatServer
from agentlightning.engine.request import RequestError
from agentlightning.errors import BadRequestError, EngineError, NonFiniteLossError
from agentlightning.training.external.remote import RemoteEngine, RemotePolicy, RemoteUpdater
from agentlightning.training.result import GRPOResult
from agentlightning.training.resume import OpenRun
from agentlightning.training.rows import StepRows
from agentlightning.training.run import train
from agentlightning.training.run_inputs import RunSource, check_tasks, triplet_adapter
from agentlightning.training.settings import TrainingSettings
from agentlightning.training.tasks import items_of
from agentlightning.training.updater import StepUpdate
from agentlightning.types import Dataset

if TYPE_CHECKING:
    from agentlightning.adapter.rows.samples import Sample

T = TypeVar("T")
PLACE: Final = "tinker.json"
"""File in a checkpoint, and in the folder of the trained model, with its address on the service."""
_ANSWER_SECONDS: Final = 600.0
"""Timeout in seconds for one request of a step; the service queues requests."""
_CLOSE_SECONDS: Final = 10.0
"""Timeout in seconds for reporting the end of the run; without a report, the service ends the idle session itself."""
_REFUSED: Final = (tinker.AuthenticationError, tinker.PermissionDeniedError)
_MAX_TOKENS: Final = 32_768
"""Maximum number of tokens of a row, even if the model's settings allow more."""


async def run_tinker(
    source: RunSource,
    settings: TrainingSettings,
    train_dataset: Dataset[Any] | None,
    val_dataset: Dataset[Any] | None,
    *,
    api_key: str,
    base_url: str | None,
    tokenizer: str,
    rank: int,
    connect_seconds: float,
) -> GRPOResult:
    """Train with the Tinker service; see `Tinker`."""
    tasks, held_out = items_of(train_dataset), items_of(val_dataset)
    check_tasks("Tinker", settings, tasks, held_out)
    triplet_adapter(source)  # before loading anything
    policy = await asyncio.to_thread(RemotePolicy, tokenizer, _MAX_TOKENS, "tokenizer")

    async def make_updater(opened: OpenRun, stack: AsyncExitStack) -> TinkerUpdater:
        checkpoint, state = opened.resume.checkpoint, None
        if checkpoint is not None:
            policy.weight_version = checkpoint.facts["weight_version"]
            state = json.loads((checkpoint.path / PLACE).read_text())["state"]
        service = TinkerService(settings.model, base_url, api_key)
        stack.push_async_exit(service.close)
        await asyncio.to_thread(service.open, rank, settings.seed, state, policy.weight_version, connect_seconds)
        served = policy.served_as(settings, "agl.Tinker")
        server = ChatServer(service, policy.tokenizer, served, token=service.token)
        await server.start("127.0.0.1")
        stack.callback(server.stop)
        return TinkerUpdater(policy, settings, service, server.base_url)

    config, facts = {"tinker": {**settings.as_json(), "rank": rank}}, {"tinker": {"rank": rank}}
    return await train(source, settings, tasks, held_out, make_updater, config=config, facts=facts)


class TinkerUpdater(RemoteUpdater):
    """Sends the rows of each step to the service."""

    def __init__(self, policy: RemotePolicy, settings: TrainingSettings, service: TinkerService, base_url: str) -> None:
        super().__init__(policy, settings, RemoteEngine(base_url, service.token), name=service.name)
        self._service = service

    @override
    def update_weights(self, step: int, rows: StepRows) -> StepUpdate:
        settings, version = self.learners[0].settings, self.weight_version + 1
        figures = self._service.learn(
            rows.samples,
            cast("list[float]", rows.advantages),  # agl.Tinker refuses turn_advantage_weight
            share=rows.share("token"),
            learning_rate=settings.learning_rate_at(step),
            clip=settings.max_grad_norm,
        )
        self._service.publish(version)
        self.advance(version)
        return StepUpdate(figures, changed=frozenset((None,)))

    @override
    def save_model(self, folder: Path) -> None:
        self._service.save_model(folder)

    @override
    def save_checkpoint(self, folder: Path, step: int) -> None:
        try:
            self._service.save(folder, step)
        except EngineError as error:
            raise OSError(str(error)) from error  # a checkpoint that cannot be written: the run warns and continues


class TinkerService:
    """One training client. `generate` belongs to the loop; the other methods to one thread at a time.

    They raise an EngineError if the service fails or does not respond in time. Its `name` is unique to this start of
    the run; `token` is for calls to the endpoint in front of it.
    """

    def __init__(self, model: str, base_url: str | None, key: str) -> None:
        self.name, self.token = f"agl-{uuid4().hex}", uuid4().hex
        self._model = model
        self._client = tinker.ServiceClient(base_url=base_url, api_key=key)
        self._address = base_url or "the vendor's address, or TINKER_BASE_URL"
        self._training: Any = None
        self._sampler: tuple[Any, int] | None = None

    def open(self, rank: int, seed: int, state: str | None, version: int, seconds: float) -> None:
        """Create new adapters, or load those of a state with their optimizer, and sample from them.

        Raises:
            BadRequestError: the service refuses the key or the model, or does not have the state.
            EngineError: the service did not respond within `seconds`.
        """

        def training_client() -> Any:
            if state is not None:
                return self._client.create_training_client_from_state_with_optimizer(state).result()
            return self._client.create_lora_training_client(self._model, rank=rank, seed=seed).result()

        try:
            # on a thread of its own: the client connects before it returns a future, and repeats that for minutes
            self._training = _on_thread(training_client).result(seconds)
        except TimeoutError:
            text = f"The Tinker service ({self._address}) did not respond within connect_seconds={seconds:g}"
            raise EngineError(text) from None
        except (tinker.TinkerError, ValueError) as error:
            if isinstance(error, _REFUSED) or type(error) is tinker.TinkerError:  # the latter: of the key's form
                text = f"The Tinker service rejected the key in TINKER_API_KEY: {error}"
            elif state is not None:
                text = (
                    f"Cannot resume the run: the Tinker service did not return its state {state!r} ({error}). Use "
                    "another run_id to start a new run"
                )
            else:
                text = (
                    f"The Tinker service does not train model={self._model!r}: {error}. To list its models: "
                    "tinker.RestClient().get_server_capabilities().result()"
                )
            raise BadRequestError(text) from error
        self.publish(version)

    def learn(
        self, samples: Sequence[Sample], advantages: Sequence[float], *, share: float, learning_rate: float, clip: float
    ) -> dict[str, float]:
        """Take one optimizer step and return its metrics. The loss is the sum over the N trained tokens of -ratio *
        advantage * share / N.

        Shapes: samples: (B,), advantages: (B,).

        Raises:
            NonFiniteLossError: a log-probability of the service is not finite.
        """
        tokens = sum(sum(sample.mask) for sample in samples)
        scaled = [advantage * share / tokens for advantage in advantages]
        data = [datum_of(sample, advantage) for sample, advantage in zip(samples, scaled, strict=True)]
        # send both requests before waiting for one, so that the service processes them together
        computed = self._training.forward_backward(data, "importance_sampling")
        update = self._training.optim_step(tinker.AdamParams(learning_rate=learning_rate, grad_clip_norm=clip))
        output = _answer(computed, "forward_backward")
        _answer(update, "optim_step")
        log_ratios: list[float] = []
        for sample, row in zip(samples, output.loss_fn_outputs, strict=True):
            columns = zip(row["logprobs"].tolist(), sample.logprobs[1:], sample.mask[1:], strict=True)
            log_ratios += [new - old for new, old, trained in columns if trained]
        if not all(map(math.isfinite, log_ratios)):
            raise NonFiniteLossError(
                "The Tinker service returned a log-probability that is not finite and has already updated the weights. "
                f"Resume the run from its last checkpoint with a smaller learning_rate (currently {learning_rate:g})"
            )
        return {
            "loss": output.metrics.get("loss:sum", float("nan")),
            "approx_kl": -math.fsum(log_ratios) / len(log_ratios),
            "first_ratio_error": max(abs(math.expm1(ratio)) for ratio in log_ratios),
            "learning_rate": learning_rate,
            "rows": len(samples),
            "rollouts": len({sample.rollout_id for sample in samples}),
            "tokens": tokens,
            "steps": 1,
            "skipped_steps": 0,
        }

    def publish(self, version: int) -> None:
        """Serve the current weights to later calls."""
        sampler = _answer(self._training.save_weights_and_get_sampling_client(), "save_weights_for_sampler")
        self._sampler = (sampler, version)

    async def generate(self, *, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        """Return a completion for `ChatServer`.

        Raises:
            RequestError: the service failed; the call may be retried.
        """
        assert self._sampler is not None
        sampler, version = self._sampler
        names = ("max_tokens", "temperature", "top_p", "top_k")
        params = tinker.SamplingParams(**{name: sampling_params[name] for name in names if name in sampling_params})
        try:
            (reply,) = (await sampler.sample(tinker.ModelInput.from_ints(prompt_ids), 1, params)).sequences
        except (tinker.TinkerError, ValueError) as error:
            text = f"the Tinker service failed to sample: {error}"
            raise RequestError(text, status=503, code="service_failed", retry_after=1) from error
        version_of_weights = {"global_steps": version}
        return SimpleNamespace(token_ids=reply.tokens, log_probs=reply.logprobs, extra_fields=version_of_weights)

    def save(self, folder: Path, step: int) -> None:
        """Save weights and optimizer on the service, and write their address into a folder."""
        self._write_place(folder, "state", self._training.save_state(f"{self.name}-step-{step}"))

    def save_model(self, folder: Path) -> None:
        """Save the weights for sampling on the service, and write their address into a folder."""
        self._write_place(folder, "sampler", self._training.save_weights_for_sampler(f"{self.name}-end"))

    async def close(self, error: type[BaseException] | None, *_: object) -> None:
        """End the session, and report the end of the run to the service. The `__aexit__` of a context manager."""
        ended = "success" if error is None else "errored" if issubclass(error, Exception) else "interrupted"
        await asyncio.to_thread(wait, [_on_thread(lambda: self._client.close(ended).result())], _CLOSE_SECONDS)

    def _write_place(self, folder: Path, kind: str, future: Any) -> None:
        private_folder(folder)
        (folder / PLACE).write_text(json.dumps({"model": self._model, kind: _answer(future, f"save_{kind}").path}))


def datum_of(sample: Sample, advantage: float) -> tinker.Datum:
    """Return a row in the service's form: each token but the last one predicts the next, (T - 1,) each."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(sample.token_ids[:-1]),
        loss_fn_inputs={  # pyright: ignore[reportArgumentType] -- the client converts lists
            "target_tokens": sample.token_ids[1:],
            "logprobs": sample.logprobs[1:],
            "advantages": [advantage * trained for trained in sample.mask[1:]],
        },
    )


def _answer(future: Any, request: str) -> Any:
    try:
        return future.result(_ANSWER_SECONDS)
    except TimeoutError:
        raise EngineError(f"The Tinker service did not respond to {request} within {_ANSWER_SECONDS:g} s") from None
    except (tinker.TinkerError, ValueError, RuntimeError) as error:
        raise EngineError(f"The Tinker service failed during {request}: {error}") from error


def _on_thread(work: Callable[[], T]) -> Future[T]:
    """Run work on a thread that does not delay the end of the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # the caller raises it
            future.set_exception(error)

    threading.Thread(target=run, name="agl-tinker", daemon=True).start()
    return future
