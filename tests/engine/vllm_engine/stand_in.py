"""A process that stands for vLLM where there is no GPU: its command line and its routes over our own engine.

`python -m tests.engine.vllm_engine.stand_in serve MODEL --port N ...` generates with the real model in MODEL.
It takes only the arguments, fields and routes that are stored of the real vLLM (`vllm_signatures.json`), pauses, sleeps
and loads weights and adapters as that does, and forgets its weights in a sleep of level 2. `STAND_IN_DIES_AT` is a file
whose appearance ends the process as a crash would; `STAND_IN_FAILS` makes one route fail.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import torch
import uvicorn
from peft import PeftModel
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM

from agentlightning.engine.engine import InferenceEngine
from agentlightning.training.learner.policy import Policy

SIGNATURES: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_signatures.json").read_text())
DEV = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
ADAPTERS = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1"
KEY = os.environ.get("VLLM_API_KEY")


class Server:
    """The state of the server: its model, and whether it pauses or sleeps."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.asleep: set[str] = set()
        self.paused = False
        self.in_flight = 0
        self.counters = {"request_success": 0, "prompt_tokens": 0, "generation_tokens": 0}
        self.policy = Policy.load(options.model)
        self.engine = InferenceEngine(self.policy, model_name="model", max_batch=options.max_num_seqs)
        self.engine.start()
        self.names = [options.served_model_name]
        for text in options.lora_modules or []:
            name, _, place = text.partition("=")
            self.take(self.merged(Path(place)))
            self.names.append(name)
        self.client: aiohttp.ClientSession | None = None

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        if unknown := set(body) - set(SIGNATURES["classes"]["ChatCompletionRequest"]):
            return _failed(400, f"unknown fields {sorted(unknown)}")
        if self.paused or self.asleep:
            return _failed(503, "paused")
        if body["model"] not in self.names or (self.options.enable_lora and body["model"] == self.names[0]):
            return _failed(404, f"no model {body['model']}")
        reshaped = any(name in body for name in ("top_p", "top_k", "min_p", "repetition_penalty"))
        if reshaped if self.options.logprobs_mode == "processed_logprobs" else body.get("temperature", 1) not in (0, 1):
            return _failed(500, "this stand-in returns only probabilities by temperature")
        self.in_flight += 1
        try:
            self.client = self.client or aiohttp.ClientSession()
            url = f"{self.engine.base_url}/chat/completions"
            async with self.client.post(url, json={**body, "model": "model"}) as reply:
                content = await reply.read()
        finally:
            self.in_flight -= 1
        if reply.status == 200:
            usage = json.loads(content)["usage"]
            self.counters["request_success"] += 1
            self.counters["prompt_tokens"] += usage["prompt_tokens"]
            self.counters["generation_tokens"] += usage["completion_tokens"]
        return Response(content, reply.status, media_type=reply.content_type)

    async def pause(self, request: Request) -> Response:
        assert request.query_params["mode"] == "wait"
        self.paused = True
        while self.in_flight:  # noqa: ASYNC110 -- as short as a test
            await anyio.sleep(0.01)
        return JSONResponse({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        self.paused = False
        return JSONResponse({"status": "resumed"})

    async def sleep(self, request: Request) -> Response:
        if not self.options.enable_sleep_mode:
            return _failed(500, "sleep mode is not enabled")
        await self.pause(request)
        self.asleep = {"weights", "kv_cache"}
        if request.query_params["level"] == "2":
            with torch.no_grad():
                for parameter in self.policy.model.parameters():
                    parameter.zero_()
        return JSONResponse({"status": "sleeping", "level": int(request.query_params["level"])})

    async def wake_up(self, request: Request) -> Response:
        self.asleep -= set(request.query_params.getlist("tags") or ["weights", "kv_cache"])
        self.paused = bool(self.asleep)
        return JSONResponse({"status": "sleeping" if self.asleep else "awake"})

    async def is_sleeping(self, _: Request) -> Response:
        return JSONResponse({"is_sleeping": bool(self.asleep)})

    async def collective_rpc(self, request: Request) -> Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        assert set(body["kwargs"]) <= set(SIGNATURES["functions"]["GPUModelRunner.reload_weights"])
        return self.take(load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors"))

    async def load_lora_adapter(self, request: Request) -> Response:
        body = await request.json()
        assert set(body) <= set(SIGNATURES["classes"]["LoadLoRAAdapterRequest"])
        if body["lora_name"] in self.names and not body.get("load_inplace"):
            return _failed(400, "already loaded")
        answer = self.take(self.merged(Path(body["lora_path"])))
        self.names = [self.names[0], body["lora_name"]]
        return answer

    def merged(self, adapter: Path) -> dict[str, torch.Tensor]:
        config = json.loads((adapter / "adapter_config.json").read_text())
        assert config["r"] <= self.options.max_lora_rank
        base: Any = AutoModelForCausalLM.from_pretrained(self.options.model)
        whole: Any = PeftModel.from_pretrained(base, adapter).merge_and_unload()
        return dict(whole.named_parameters())

    def take(self, tensors: dict[str, torch.Tensor]) -> Response:
        if "weights" in self.asleep:
            return _failed(500, "the memory of the weights is not resident")
        if not (self.paused or self.asleep) and self.counters["request_success"]:
            return _failed(500, "weights changed under way")
        own = dict(self.policy.model.named_parameters())
        with self.engine.paused(), torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
        return JSONResponse({"results": [None]})

    async def reset_prefix_cache(self, _: Request) -> Response:
        return JSONResponse({"success": self.in_flight == 0})

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "owned_by": "vllm"} for name in self.names]})

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": SIGNATURES["vllm"]})

    async def health(self, _: Request) -> Response:
        return Response(status_code=200)

    async def metrics(self, _: Request) -> Response:
        lines = [
            f'# TYPE vllm:{name} counter\nvllm:{name}_total{{finished_reason="stop"}} {count}.0\n'
            for name, count in self.counters.items()
        ]
        return PlainTextResponse("".join(lines))

    def app(self) -> Any:
        routes = {
            "POST /v1/chat/completions": self.chat, "GET /v1/models": self.models,
            "GET /version": self.version, "GET /health": self.health,
        }  # fmt: skip
        if DEV:
            steered = (self.pause, self.resume, self.sleep, self.wake_up, self.collective_rpc, self.reset_prefix_cache)
            routes |= {f"POST /{ask.__name__}": ask for ask in steered} | {"GET /is_sleeping": self.is_sleeping}
        if ADAPTERS and self.options.enable_lora:
            routes["POST /v1/load_lora_adapter"] = self.load_lora_adapter
        assert set(routes) <= set(SIGNATURES["routes"])
        made = [Route(name.split()[1], self.guarded(ask), methods=[name.split()[0]]) for name, ask in routes.items()]
        return Starlette(routes=[*made, Route("/metrics", self.metrics)])

    def guarded(self, ask: Any) -> Any:
        async def guarded(request: Request) -> Response:
            path = request.url.path
            if KEY and path.startswith("/v1") and request.headers.get("authorization") != f"Bearer {KEY}":
                return _failed(401, "Unauthorized")
            if path == os.environ.get("STAND_IN_FAILS"):
                return _failed(500, "made to fail")
            print(request.method, request.url.path, request.url.query, flush=True)
            return await ask(request)

        return guarded


def _failed(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=status)


def _options(arguments: list[str]) -> argparse.Namespace:
    options = [text for text in arguments if text.startswith("--")]
    if unknown := set(options) - set(SIGNATURES["arguments"]):
        sys.exit(f"vllm serve: unrecognized arguments: {' '.join(sorted(unknown))}")
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("--served-model-name", "--host", "--dtype"):
        parser.add_argument(name, required=True)
    parser.add_argument("--logprobs-mode", choices=["processed_logprobs", "raw_logprobs"], required=True)
    for name in ("--port", "--max-model-len", "--max-num-seqs", "--tensor-parallel-size", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--gpu-memory-utilization", type=float, required=True)
    parser.add_argument("--max-lora-rank", type=int, choices=[1, 8, 16, 32, 64, 128, 256, 320, 512], default=16)
    parser.add_argument("--max-loras", type=int)
    parser.add_argument("--lora-modules", nargs="+")
    for name in ("--enable-sleep-mode", "--enable-lora"):
        parser.add_argument(name, action="store_true")
    return parser.parse_args(arguments)


def _die_when(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)
    path.unlink()
    os._exit(17)


def main() -> None:
    assert sys.argv[1] == "serve"
    options = _options(sys.argv[2:])
    if place := os.environ.get("STAND_IN_DIES_AT"):
        threading.Thread(target=_die_when, args=(Path(place),), daemon=True).start()
    uvicorn.run(Server(options).app(), host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
