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
        self.requests = self.prompt_tokens = self.completion_tokens = 0
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
            return JSONResponse({"error": {"message": f"unknown fields {sorted(unknown)}"}}, status_code=400)
        if self.paused or self.asleep:
            return JSONResponse({"error": {"message": "paused"}}, status_code=503)
        if body["model"] not in self.names or (self.options.enable_lora and body["model"] == self.names[0]):
            return JSONResponse({"error": {"message": f"no model {body['model']}"}}, status_code=404)
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
            self.requests += 1
            self.prompt_tokens += usage["prompt_tokens"]
            self.completion_tokens += usage["completion_tokens"]
        return Response(content, reply.status, media_type=reply.content_type)

    async def drain(self) -> None:
        self.paused = True
        while self.in_flight:  # noqa: ASYNC110 -- as short as a test
            await anyio.sleep(0.01)

    async def pause(self, request: Request) -> Response:
        assert request.query_params["mode"] == "wait"
        await self.drain()
        return JSONResponse({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        self.paused = False
        return JSONResponse({"status": "resumed"})

    async def sleep(self, request: Request) -> Response:
        if not self.options.enable_sleep_mode:
            return JSONResponse({"error": "sleep mode is not enabled"}, status_code=500)
        await self.drain()
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
            return JSONResponse({"error": {"message": "already loaded"}}, status_code=400)
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
            return JSONResponse({"error": "the memory of the weights is not resident"}, status_code=500)
        if not (self.paused or self.asleep) and self.requests:
            return JSONResponse({"error": "weights changed under way"}, status_code=500)
        own = dict(self.policy.model.named_parameters())
        with self.engine.swap(), torch.no_grad():
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
            "# TYPE vllm:request_success counter",
            f'vllm:request_success_total{{finished_reason="stop"}} {self.requests}.0',
            "# TYPE vllm:prompt_tokens counter",
            f"vllm:prompt_tokens_total {self.prompt_tokens}.0",
            "# TYPE vllm:generation_tokens counter",
            f"vllm:generation_tokens_total {self.completion_tokens}.0",
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    def app(self) -> Any:
        routes = {
            "POST /v1/chat/completions": self.chat,
            "GET /v1/models": self.models,
            "GET /version": self.version,
            "GET /health": self.health,
        }
        if DEV:
            routes |= {
                "POST /pause": self.pause,
                "POST /resume": self.resume,
                "POST /sleep": self.sleep,
                "POST /wake_up": self.wake_up,
                "GET /is_sleeping": self.is_sleeping,
                "POST /collective_rpc": self.collective_rpc,
                "POST /reset_prefix_cache": self.reset_prefix_cache,
            }
        if ADAPTERS and self.options.enable_lora:
            routes["POST /v1/load_lora_adapter"] = self.load_lora_adapter
        assert set(routes) <= set(SIGNATURES["routes"])
        made = [Route(name.split()[1], self.guarded(ask), methods=[name.split()[0]]) for name, ask in routes.items()]
        return Starlette(routes=[*made, Route("/metrics", self.metrics)])

    def guarded(self, ask: Any) -> Any:
        async def guarded(request: Request) -> Response:
            path = request.url.path
            if KEY and path.startswith("/v1") and request.headers.get("authorization") != f"Bearer {KEY}":
                return JSONResponse({"error": "Unauthorized"}, status_code=401)
            if path == os.environ.get("STAND_IN_FAILS"):
                return JSONResponse({"error": "made to fail"}, status_code=500)
            print(request.method, request.url.path, request.url.query, flush=True)
            return await ask(request)

        return guarded


def _options(arguments: list[str]) -> argparse.Namespace:
    given = [text for text in arguments if text.startswith("--")]
    if unknown := set(given) - set(SIGNATURES["arguments"]):
        sys.exit(f"vllm serve: unrecognized arguments: {' '.join(sorted(unknown))}")
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("--served-model-name", "--host", "--logprobs-mode", "--dtype"):
        parser.add_argument(name, required=True)
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
    assert options.logprobs_mode == "processed_logprobs"
    if place := os.environ.get("STAND_IN_DIES_AT"):
        threading.Thread(target=_die_when, args=(Path(place),), daemon=True).start()
    uvicorn.run(Server(options).app(), host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
