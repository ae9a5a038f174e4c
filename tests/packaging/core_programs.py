"""Programs of the core, which run on every system: `python -m tests.packaging.core_programs NAME ...`.

What the system in `AGL_TEST_SYSTEM` has not is hidden before our package is imported; without one they run on the
system that there is. The last line of the output says how each ended, as JSON: its traceback, or "done".
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__") and (system := os.environ.get("AGL_TEST_SYSTEM")):
    from tests.packaging.elsewhere import hide

    hide(system)  # pyright: ignore[reportArgumentType] -- checked by the test that sets it

CORE = (
    "adapter chat client config emitter execution litagent llm_proxy logging models prompts reward runner server "
    "store.memory store.sqlite store.http store.client_server store.wrappers tracer trackers trainer types utils "
    "algorithm.fast evaluation training.rollouts training.records training.ledger_records cli dashboard"
)


def names() -> None:
    """Every public name of the package, and every module of the core."""
    import agentlightning as agl

    loaded = [
        getattr(agl, name) for name in agl.__all__ if name not in ("APO", "GEPA", "GRPO", "PPO", "SFT", "TRL", "Tinker")
    ]
    assert len(loaded) > 50
    for part in CORE.split():
        importlib.import_module(f"agentlightning.{part}")
    assert "torch" not in sys.modules


async def _walk(store: Any) -> None:
    """One rollout from its task to its end, by hand."""
    from agentlightning.types import Span

    await store.add_resources({})
    queued = await store.enqueue_rollout("task", mode="train")
    attempted = await store.dequeue_rollout(worker_id="one")
    assert attempted.rollout_id == queued.rollout_id
    attempt = attempted.attempt.attempt_id
    span = Span.from_attributes(rollout_id=queued.rollout_id, attempt_id=attempt, sequence_id=1, attributes={"a": 1})
    await store.add_span(span)
    await store.update_attempt(queued.rollout_id, attempt, status="succeeded")
    [done] = await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=10)
    assert (done.status, len(await store.query_spans(queued.rollout_id))) == ("succeeded", 1)


def stores() -> None:
    """The store in memory, on SQLite in a file, and over HTTP."""
    from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
    from agentlightning.store.memory import InMemoryLightningStore
    from agentlightning.store.sqlite import SQLiteLightningStore

    async def main(folder: str) -> None:
        await _walk(InMemoryLightningStore())
        durable = SQLiteLightningStore(Path(folder) / "store.db")
        await _walk(durable)
        await durable.close()
        again = SQLiteLightningStore(Path(folder) / "store.db")
        assert (await again.query_rollouts()).total == 1
        await again.close()
        server = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0)
        await server.start()
        client = LightningStoreClient(server.endpoint)
        await _walk(client)
        await client.close()
        await server.stop()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(folder))


class _Model(BaseHTTPRequestHandler):
    """A model server: always the same reply."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": "forty-two"}
        body = json.dumps({
            "id": "1", "object": "chat.completion", "created": 1, "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        }).encode()  # fmt: skip
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def agent(task: str, llm: Any) -> float:
    import urllib.request

    body = json.dumps({"model": llm.model, "messages": [{"role": "user", "content": task}]}).encode()
    request = urllib.request.Request(f"{llm.endpoint}/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return float(json.load(answer)["choices"][0]["message"]["content"] == "forty-two")


def gateway() -> None:
    """Gateway, runner and tracer: the model call of an agent is in the store."""
    from agentlightning.litagent import rollout
    from agentlightning.llm_proxy import LLMProxy
    from agentlightning.runner import LitAgentRunner
    from agentlightning.store.memory import InMemoryLightningStore
    from agentlightning.tracer.otel import OtelTracer

    model = ThreadingHTTPServer(("127.0.0.1", 0), _Model)
    threading.Thread(target=model.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{model.server_port}/v1"

    async def main() -> None:
        store = InMemoryLightningStore()
        entry = {"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": address, "api_key": "none"}}
        proxy = LLMProxy(store=store, model_list=[entry])
        await proxy.start()
        await store.add_resources({"main_llm": proxy.as_resource()})
        queued = await store.enqueue_rollout("hello", mode="train")
        runner = LitAgentRunner[str](OtelTracer(), max_rollouts=1)
        with runner.run_context(agent=rollout(agent), store=store):
            await runner.iter()
        await proxy.stop()
        [attempt] = await store.query_attempts(queued.rollout_id)
        assert (attempt.status, attempt.outcome) == ("succeeded", "scored"), attempt
        assert len(await store.query_spans(queued.rollout_id)) >= 2

    asyncio.run(main())
    model.shutdown()


def greet(task: str, prompt_template: Any) -> float:
    """An agent without a model."""
    return float(prompt_template.format(name=task) == f"Hello, {task}!")


def _fit(strategy: object) -> None:
    import agentlightning as agl

    prompt = agl.PromptTemplate(template="Hello, {name}!", engine="f-string")
    trainer = agl.Trainer(
        algorithm=agl.Baseline(), initial_resources={"prompt": prompt}, strategy=strategy, n_runners=2
    )
    trainer.fit(agl.rollout(greet), train_dataset=["Ada", "Grace", "Barbara"])
    assert str(trainer.result) == "3 rollouts (3 scored), mean reward 1.000", trainer.result


def threads() -> None:
    """A run whose runners are threads."""
    _fit("shm")


def processes() -> None:
    """A run whose runners are processes, started by `spawn`."""
    _fit({"type": "cs", "start_method": "spawn"})
    assert multiprocessing.active_children() == []


def command() -> None:
    """The command line: help, and what there is on this system."""
    from agentlightning.cli import main

    for arguments in (["--help"], ["--version"], ["doctor"]):
        sys.argv = ["agl", *arguments]
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        assert not code, (arguments, code)


PROGRAMS = {program.__name__: program for program in (names, stores, gateway, threads, processes, command)}

if __name__ == "__main__":
    ends = dict[str, str]()
    for program in sys.argv[1:]:
        try:
            PROGRAMS[program]()
            ends[program] = "done"
        except Exception:
            ends[program] = traceback.format_exc()
    print(json.dumps(ends))
