"""Another process of the same user looks for the token and the provider's key: in `/proc`, memory included."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import LightningStoreClient
from tests.stubs.processes import run_program
from tests.stubs.unprivileged import ATTACK, Unprivileged, folder_of_unprivileged, unprivileged

PROGRAM = (
    ATTACK
    + """
task = json.loads(sys.stdin.readline())
print(json.dumps({"found": attack(task["planted"], task["spared"]), "own": dict(os.environ)}), file=sys.stderr)
print(1.0)
"""
)
AGENTS = """
import sys
import agentlightning as agl

programs = agl.CommandAgent([sys.executable, "program.py"])
"""
SCRIPT = """
import json, os, subprocess, sys
import agentlightning as agl

method, isolation = sys.argv[1:3]


@agl.rollout
def own_subprocess(task, llm):
    done = subprocess.run([sys.executable, "program.py"], input=json.dumps(task), capture_output=True, text=True)
    said = json.loads(done.stderr)
    said["here"] = sorted(name for name in ("AGL_TOKEN", "PROVIDER_KEY") if name in os.environ)
    said["agents_own"] = os.environ.get("MY_OWN_KEY")
    said["key"] = llm.api_key
    with open(f"said-{os.getpid()}.json", "w") as file:
        json.dump(said, file)
    return 1.0


@agl.algo
async def asks(*, store, llm_proxy, train_dataset):
    await store.add_resources({"llm": llm_proxy.as_resource()})
    rollout = await store.enqueue_rollout(train_dataset[0])
    await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=60)


if __name__ == "__main__":
    entry = {"model_name": "m", "litellm_params": {"model": "m", "api_base": "http://127.0.0.1:9/v1",
                                                   "api_key": "os.environ/PROVIDER_KEY"}}
    shared = {"type": "shm"} if method == "shm" else {"type": "cs", "server_port": 0, "start_method": method}
    trainer = agl.Trainer(n_runners=1, algorithm=asks, strategy=shared, runner={"isolation": isolation},
                          llm_proxy={"model_list": [entry]})
    trainer.fit(own_subprocess, train_dataset=[json.loads(os.environ["TASK"])])
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_of_unprivileged() as folder:
        (folder / "program.py").write_text(PROGRAM)
        (folder / "agents.py").write_text(AGENTS)
        (folder / "script.py").write_text(SCRIPT)
        yield folder


@pytest.fixture
def planted() -> tuple[str, str]:
    """A token and a provider's key that nothing else has."""
    return f"token-{secrets.token_hex(16)}", f"provider-{secrets.token_hex(16)}"


def environment(user: Unprivileged, folder: Path, planted: tuple[str, str], **further: str) -> dict[str, str]:
    variables = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    here = {"HOME": str(folder), "TMPDIR": str(folder), "PYTHONPATH": f"{folder}{os.pathsep}{user.path}"}
    return {**variables, **here, "AGL_TOKEN": planted[0], "PROVIDER_KEY": planted[1], **further}


def task_of(planted: tuple[str, str]) -> dict[str, Any]:
    # where the tests run as the same user, the test itself holds the texts
    return {"planted": [text.encode().hex() for text in planted], "spared": [os.getpid(), os.getppid()]}


def test_the_attack_finds_what_is_not_protected(folder: Path, planted: tuple[str, str]) -> None:
    user = unprivileged()
    environ = environment(user, folder, planted)
    decoy = subprocess.Popen(["sleep", "600"], env=environ, cwd=folder, **user.popen)
    try:
        done = subprocess.run(
            [user.python, "program.py"],
            input=json.dumps(task_of(planted)),
            env={"PATH": environ["PATH"]},
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            **user.popen,
        )
    finally:
        decoy.kill()
        decoy.wait()
    lines = json.loads(done.stderr)["found"]
    assert [line for line in lines if line.startswith("token-") and f"environ of {decoy.pid} " in line]
    assert [line for line in lines if line.startswith("provider") and f"environ of {decoy.pid} " in line]


@pytest.mark.heavy
async def test_a_program_finds_nothing_in_runner_store_gateway_and_guard(
    folder: Path, planted: tuple[str, str]
) -> None:
    user = unprivileged()
    ours: list[subprocess.Popen[str]] = []

    def agl(*arguments: str) -> str:
        command = [user.python, "-m", "agentlightning.cli", *arguments]
        with (folder / "errors").open("a") as errors:
            process = subprocess.Popen(
                command,
                env=environment(user, folder, planted),
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                **user.popen,
            )
        ours.append(process)
        assert process.stdout is not None
        return "" if arguments[0] == "runner" else process.stdout.readline()

    client = None
    try:
        url = (await asyncio.to_thread(agl, "store", "--port", "0", "--db", "agl.db")).split()[-1]
        model = ("--upstream", "http://127.0.0.1:9/v1", "--model", "m", "--api-key", "PROVIDER_KEY")
        assert "OPENAI_BASE_URL" in await asyncio.to_thread(agl, "gateway", *model, "--store", url)
        agl("runner", "agents:programs", "--store", url)
        client = LightningStoreClient(url, token=planted[0])
        rollout = await client.enqueue_rollout(task_of(planted))
        [ended] = await client.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=120)
        assert ended.status == "succeeded", (folder / "errors").read_text()
        spans = await client.query_spans(rollout.rollout_id)
        texts = [text for span in spans for text in map(str, span.attributes.values()) if '"found"' in text]
        assert '\\"found\\": []' in texts[0] or '"found": []' in texts[0], texts[0]
    finally:
        if client is not None:
            await client.close()
        for process in ours:
            process.terminate()
        for process in ours:
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "isolation"),
    [("fork", "thread"), ("fork", "process"), ("spawn", "thread"), ("forkserver", "process"), ("shm", "thread")],
)
def test_what_an_agent_starts_finds_nothing_and_the_agents_own_key_stays(
    folder: Path, planted: tuple[str, str], method: str, isolation: str
) -> None:
    user = unprivileged()
    task = json.dumps(task_of(planted))
    whole = environment(user, folder, planted, TASK=task, MY_OWN_KEY="of the agent")
    words = (user.python, "script.py", method, isolation)
    run_program(*words, folder=folder, environment=whole, popen=user.popen, timeout=120)
    [file] = folder.glob("said-*.json")
    report = json.loads(file.read_text())
    assert report["found"] == []
    assert not {"AGL_TOKEN", "PROVIDER_KEY"} & {*report["own"], *report["here"]}
    assert report["agents_own"] == report["own"]["MY_OWN_KEY"] == "of the agent"
    assert report["key"].startswith("agl-")
    assert planted[0] not in file.read_text()
