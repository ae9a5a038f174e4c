"""A server that speaks the routes of the Tinker service, and computes: a small model of torch that samples, has the
gradient of the importance-sampling loss taken, and learns by Adam. It keeps states and samplers in memory."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker.proto import tinker_public_pb2 as wire
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.utils.http.protocol import HttpBounds
from agentlightning.utils.http.uvicorn_server import AsgiServer

KEY = "tml-a-key-of-the-tests"
MODEL = "small/model"

Json = dict[str, Any]


@dataclass
class StubService:
    """One service with one base model. Its requests are in `asked`, the rows of each training request in `rows`."""

    folder: Path
    asked: list[str] = field(default_factory=list[str])
    rows: list[list[Json]] = field(default_factory=list[list[Json]])
    sampled: list[Json] = field(default_factory=list[Json])
    fails: Callable[[str], str | None] = lambda _: None
    """Gives the text of the error with which a request of a kind fails; None answers it."""
    ended: list[str] = field(default_factory=list[str])
    """The endings that the runs reported."""
    url: str = ""

    def __post_init__(self) -> None:
        self._base = AutoModelForCausalLM.from_pretrained(self.folder).eval()
        self._eos = AutoTokenizer.from_pretrained(self.folder).eos_token_id
        self._numbers = itertools.count(1)
        self._training: dict[str, tuple[Any, Any]] = {}  # model and optimizer of each training client
        self.states: dict[str, tuple[Json, Json]] = {}
        self._samplers: dict[str, Any] = {}
        self._answers: dict[str, bytes | Json] = {}
        self._draws = torch.Generator().manual_seed(0)
        self._lock = threading.Lock()

    def _new(self, state: tuple[Json, Json] | None = None) -> tuple[Any, Any]:
        model = copy.deepcopy(self._base)
        optimizer = torch.optim.Adam(model.parameters())
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(copy.deepcopy(state[1]))
        return model, optimizer

    def _forward_backward(self, message: Any) -> bytes:
        assert message.loss_fn == "importance_sampling"
        (model, _), rows, logprobs, total = self._training[message.model_id], list[Json](), list[np.ndarray](), 0.0
        for datum in message.data:
            tokens = np.frombuffer(datum.model_input[0].encoded_text.tokens, np.int32)
            inputs = {
                name: np.frombuffer(tensor.dense, np.int64 if tensor.dtype == wire.DTYPE_INT64 else np.float32)
                for name, tensor in datum.loss_fn_inputs.items()
            }
            rows.append({"tokens": tokens.tolist(), **{name: values.tolist() for name, values in inputs.items()}})
            target, old, advantages = (
                torch.from_numpy(inputs[name].copy()) for name in ("target_tokens", "logprobs", "advantages")
            )
            logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
            new = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]  # (T,)
            loss = -((new - old).exp() * advantages).sum()
            loss.backward()
            total += float(loss.detach())
            logprobs.append(new.detach().numpy())
        self.rows.append(rows)
        offsets = np.cumsum([0, *(4 * len(one) for one in logprobs)], dtype=np.int64)
        column = wire.BatchedTensor(
            data=np.concatenate(logprobs).tobytes(), offsets=offsets.tobytes(), dtype=wire.DTYPE_FLOAT32
        )
        record = wire.ArrayRecord(type_tag="logprobs", fields={"logprobs": column}, num_datums=len(logprobs))
        return wire.ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics={"loss:sum": total}
        ).SerializeToString()

    def _optim_step(self, body: Json) -> Json:
        (model, optimizer), params = self._training[body["model_id"]], body["adam_params"]
        for group in optimizer.param_groups:
            group |= {"lr": params["learning_rate"], "betas": (params["beta1"], params["beta2"]), "eps": params["eps"]}
        if params["grad_clip_norm"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), params["grad_clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        return {"metrics": {}}

    def _sample(self, body: Json) -> bytes:
        model, params = self._samplers[body["sampling_session_id"]], body["sampling_params"]
        prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        tokens, logprobs = list[int](), list[float]()
        with torch.no_grad():
            while len(tokens) < params["max_tokens"] and self._eos not in tokens:
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
                if params["temperature"]:
                    distribution = (logits / params["temperature"]).log_softmax(-1)
                    likely, order = distribution.exp().sort(descending=True)
                    likely[likely.cumsum(-1) - likely >= params["top_p"]] = 0.0
                    likely[params["top_k"] if params["top_k"] > 0 else len(likely) :] = 0.0
                    tokens.append(int(order[torch.multinomial(likely, 1, generator=self._draws)]))
                else:
                    distribution = logits.log_softmax(-1)
                    tokens.append(int(distribution.argmax()))
                logprobs.append(float(distribution[tokens[-1]]))
        self.sampled.append({"prompt": prompt, "tokens": tokens, "logprobs": logprobs})
        sequence = wire.SampledSequence(
            stop_reason=wire.STOP_REASON_STOP if tokens[-1] == self._eos else wire.STOP_REASON_LENGTH,
            tokens=np.asarray(tokens, np.int32).tobytes(),
            logprobs=np.asarray(logprobs, np.float32).tobytes(),
        )
        return wire.SampleResponse(sequences=[sequence]).SerializeToString()

    def _do(self, kind: str, body: Any) -> bytes | Json:
        match kind:
            case "create_model" | "load_weights":
                if body.get("base_model", MODEL) != MODEL:
                    return {"error": f"unknown base model {body['base_model']}", "category": "user"}
                path = body.get("path")
                if path is not None and path not in self.states:
                    return {"error": f"no weights at {path}", "category": "user"}
                model_id = f"{body['session_id']}:train:{body['model_seq_id']}"
                self._training[model_id] = self._new(None if path is None else self.states[path])
                return {"path": path, "model_id": model_id}
            case "forward_backward":
                return self._forward_backward(body)
            case "optim_step":
                return self._optim_step(body)
            case "save_weights":
                path = f"tinker://{body['model_id']}/weights/{body['path']}"
                self.states[path] = copy.deepcopy(tuple(each.state_dict() for each in self._training[body["model_id"]]))
                return {"path": path}
            case "save_weights_for_sampler":
                if body.get("path"):
                    return {"path": f"tinker://{body['model_id']}/sampler_weights/{body['path']}"}
                session = f"sampler-{next(self._numbers)}"
                self._samplers[session] = copy.deepcopy(self._training[body["model_id"]][0])
                return {"sampling_session_id": session}
            case _:
                assert kind == "asample", kind
                return self._sample(body)

    async def promise(self, request: Request) -> Response:
        """Compute at once; the answer is fetched by `retrieve_future`."""
        kind = request.url.path.rpartition("/")[2]
        self.asked.append(kind)
        if request.headers.get("x-api-key") != KEY:
            return JSONResponse({"detail": "unknown key"}, 401)
        raw = await request.body()
        body: Any = wire.ForwardBackwardRequest.FromString(raw) if kind == "forward_backward" else json.loads(raw)
        number = f"request-{next(self._numbers)}"
        error = self.fails(kind)
        with self._lock:
            self._answers[number] = self._do(kind, body) if error is None else {"error": error, "category": "server"}
        return JSONResponse({"request_id": number, "sample_sequence_ids": [f"{number}-0"]})

    async def retrieve(self, request: Request) -> Response:
        answer = self._answers[(await request.json())["request_id"]]
        if isinstance(answer, dict):
            return JSONResponse(answer)
        return Response(answer, media_type="application/x-protobuf")

    async def answer(self, request: Request) -> Response:
        """Answer a request that needs no computation."""
        path = request.url.path
        self.asked.append(path.rpartition("/")[2])
        if request.headers.get("x-api-key") != KEY:
            return JSONResponse({"detail": "unknown key"}, 401)
        if path.endswith("get_info"):
            return JSONResponse({"model_id": (await request.json())["model_id"], "model_data": {"model_name": MODEL}})
        if "/samplers/" in path:
            return JSONResponse({"sampler_id": path.rpartition("/")[2], "base_model": MODEL})
        return JSONResponse({"session_id": f"session-{next(self._numbers)}", "status": "accepted"})

    async def finish(self, request: Request) -> Response:
        """End a session."""
        self.ended.append((await request.json())["reason"]["type"])
        return Response(status_code=204)

    def app(self) -> Starlette:
        promised = ("create_model", "load_weights", "forward_backward", "optim_step", "save_weights", "asample")
        promised += ("save_weights_for_sampler",)
        at_once = ("client/config", "client/dynamic_config", "create_session", "session_heartbeat")
        at_once += ("telemetry", "get_info")
        routes = [Route(f"/api/v1/{name}", self.promise, methods=["POST"]) for name in promised]
        routes += [Route(f"/api/v1/{name}", self.answer, methods=["POST"]) for name in at_once]
        routes += [Route("/api/v1/samplers/{name}", self.answer)]
        routes += [Route("/api/v1/sessions/{name}/finish", self.finish, methods=["POST"])]
        return Starlette(routes=[*routes, Route("/api/v1/retrieve_future", self.retrieve, methods=["POST"])])

    @contextmanager
    def serving(self) -> Generator[str]:
        """Serve on a free port of this machine; gives its address."""
        listener = socket.create_server(("127.0.0.1", 0))
        server = AsgiServer(self.app(), patience=1.0, bounds=HttpBounds(), log_level=logging.WARNING)
        thread = threading.Thread(target=server.run, args=([listener],), name="stub-tinker", daemon=True)
        thread.start()
        server.ready.result(20)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield self.url
        finally:
            server.request_stop()
            thread.join(20)
