"""`agl env` as a shell runs it: the list, and tries of environments with a model server or the embedded engine."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli import env, main
from agentlightning.cli.env import ENVIRONMENTS
from tests.cli.terminal import on_terminal, shell
from tests.stubs.model_server import Fault, ModelServer
from tests.stubs.processes import ROOT, Terminal, run_program

PROGRAM = """
import openai
import agentlightning as agl

def grade(task, answer):
    return float(task["answer"] in answer)

TASKS = [{"question": f"{n} and {n}", "answer": f"is {2 * n}"} for n in range(6)]
sums = agl.tasks_from(TASKS, grade)

def made():
    return sums

@agl.rollout
def tool_user(task, llm: agl.LLM):
    if task["question"] == "fail":
        raise LookupError("the database is gone")
    if task["question"] == "fault":
        raise agl.PolicyFault("no JSON", reward=-1)
    messages = [{"role": "user", "content": task["question"]}]
    with openai.OpenAI(base_url=llm.endpoint, api_key="unused") as client:
        for _ in range(2):
            fields = {"model": llm.model, "messages": messages, **llm.sampling_parameters}
            message = client.chat.completions.create(**fields).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "found 7"})
    return None if task["question"] == "silent" else 0.5

class Silent(agl.LitAgent):
    def rollout(self, task, resources, rollout):
        return 1.0
"""


TASKS = [{"question": f"{n} and {n}", "answer": f"is {2 * n}"} for n in range(6)]


def answer(request: dict[str, Any]) -> Any:
    """Call a tool for a search; else answer a sum."""
    messages = request["messages"]
    if messages[-1]["content"] == "search":
        function = {"name": "search", "arguments": '{"query": "x"}'}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }
    number = re.match(r"\d", messages[0]["content"])
    return f"it is {2 * int(number[0])}" if number and number[0] != "2" else "I do not know\n" * 20


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer(answer) as server:
        server.models = [{"id": "m"}]
        yield server


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("mine.py").write_text(PROGRAM)
    return tmp_path


def tries(folder: Path, server: ModelServer, *words: str, **environment: str) -> Any:
    return shell("env", "try", *words, "--model", server.base_url, cwd=folder, **environment)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")


# --- list ------------------------------------------------------------------------------------------------------------


def test_the_list_shows_what_is_installed_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "textworld").mkdir()
    (tmp_path / "textworld/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "textworld-1.7.0.dist-info").mkdir()
    (tmp_path / "textworld-1.7.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: textworld\nVersion: 1.7.0\n"
    )
    listed = partial(run_program, "agl", "env", "list", PYTHONPATH=f"{tmp_path}:{ROOT}", COLUMNS="120")
    lines = {line.split()[0]: line for line in listed().stdout.splitlines()}
    assert lines["textworld"].split()[-2:] == ["examples/textworld", "1.7.0"]
    assert lines["FILE.py:OBJECT"].rstrip().endswith("part of this package")
    found = {each["name"]: each for each in json.loads(listed("--json").stdout)}
    assert found["textworld"]["version"] == "1.7.0"
    for each in ENVIRONMENTS:
        is_missing = found[each.name]["version"] is None and each.package != ""
        assert ("not installed: pip install" in lines[each.name]) == is_missing


def test_each_environment_of_the_list_is_one_of_the_documents() -> None:
    extras = (ROOT / "pyproject.toml").read_text()
    for each in ENVIRONMENTS:
        if place := re.search(r"(docs|examples)/\S+", each.about):
            assert (ROOT / place[0]).exists()
        if extra := re.search(r"\[(.+)\]", each.install):
            assert f"\n{extra[1]} = " in extras


def test_only_reasoning_gym_has_a_list_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list", "reasoning-gim"]) == 2
    assert "did you mean 'reasoning-gym'" in capsys.readouterr().err


# --- try -------------------------------------------------------------------------------------------------------------


def test_three_tasks_are_run_and_each_conversation_is_shown_with_its_reward(folder: Path, server: ModelServer) -> None:
    done = tries(folder, server, "mine.py:sums", "--max-tokens", "9", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    shown = [[f"user: {n} and {n}", f"assistant: it is {2 * n}", "reward: 1"] for n in range(2)]
    for number, (line, lines) in enumerate(zip(TASKS, shown, strict=False), start=1):
        assert "\n".join([f"--- task {number} of 3: {line}", *lines, ""]) in done.stdout
    assert done.stdout.splitlines()[-1] == "3 tasks: mean reward 0.667"
    assert [(call.request["max_tokens"], call.request["temperature"]) for call in server.calls] == [(9, 0)] * 3
    assert left(folder) == ["mine.py"]


def test_a_failed_rollout_shows_its_error_and_is_no_reward_of_0(folder: Path, server: ModelServer) -> None:
    tasks = [{"question": name} for name in ("search", "fail", "fault", "silent")]
    Path("t.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    done = tries(folder, server, "mine:tool_user", "--dataset", "t.jsonl", "--tasks", "9", "--store", "agl.db")
    assert done.returncode == 1
    for text in (
        "--- task 1 of 4: {'question': 'search'}\nuser: search\nassistant calls search({\"query\": \"x\"})\n"
        "--- model call 2\ntool: found 7\nassistant: I do not know\n",
        "no reward (failed infrastructure_fault exception: LookupError: the database is gone)\n",
        "reward: -1 (failed policy_fault policy_fault: agentlightning.errors.PolicyFault: no JSON)\n",
        "no reward (succeeded unscored no_reward)\n",
        "4 tasks: mean reward -0.250, 2 without a reward\n",
    ):
        assert text in done.stdout
    assert 'in tool_user\n    raise LookupError("the database is gone")' in done.stderr
    assert shell("rollouts", "list", "--store", "agl.db", cwd=folder).stdout.count("ro-") == 4


def test_messages_are_cut_to_the_terminal_unless_they_are_to_be_whole(folder: Path, server: ModelServer) -> None:
    words = ("env", "try", "mine.py:sums", "--model", server.base_url)
    assert on_terminal(*words, columns=60)[1].count("  I do not know") == 10
    assert tries(folder, server, "mine.py:sums").stdout.count("I do not know ... (291 characters)") == 1
    assert tries(folder, server, "mine.py:sums", "--full").stdout.count("I do not know") == 20


def test_json_is_one_document(folder: Path, server: ModelServer) -> None:
    server.faults = [Fault(status=400)]
    done = tries(folder, server, "mine.py:made", "--tasks", "2", "--json")
    assert done.returncode == 1
    shown = json.loads(done.stdout)
    assert (shown["environment"], shown["mean_reward"]) == ("mine.py:made", 1.0)
    failed, good = shown["rollouts"]
    assert failed["reward"] is None
    assert "ChatError" in failed["error"]
    assert good["messages"] == [[{"role": "user", "content": "1 and 1"}, {"role": "assistant", "content": "it is 2"}]]


def test_a_call_that_the_client_repeats_is_shown_once(folder: Path, server: ModelServer) -> None:
    server.faults = [Fault(status=503)]
    done = tries(folder, server, "mine.py:sums", "--tasks", "1")
    assert done.stdout.count("user: 0 and 0\n") == 1
    assert done.stdout.endswith("assistant: it is 0\nreward: 1\n1 task: mean reward 1.000\n")


def test_a_seed_selects_the_same_tasks_again(folder: Path, server: ModelServer) -> None:
    def questions(*words: str) -> list[str]:
        server.calls.clear()
        tries(folder, server, "mine.py:sums", *words)
        return [call.request["messages"][0]["content"] for call in server.calls]

    first = questions("--seed", "3")
    assert first == questions("--seed", "3") != questions()
    assert len(set(first)) == 3


def test_the_server_gets_the_key_and_no_output_has_it(folder: Path, server: ModelServer) -> None:
    server.models = [{"id": "openai/m"}]  # the name begins as a provider does
    done = tries(folder, server, "mine.py:sums", "--api-key", "MY_KEY", "--json", MY_KEY="s3cret")
    assert (done.returncode, {call.request["model"] for call in server.calls}) == (0, {"openai/m"})
    assert server.get_headers["/v1/models"]["authorization"] == "Bearer s3cret"
    assert {call.headers["authorization"] for call in server.calls} == {"Bearer s3cret"}
    assert "s3cret" not in done.stdout + done.stderr
    assert (
        "--api-key MY_KEY: the environment variable is not set"
        in tries(folder, server, "mine.py:sums", "--api-key", "MY_KEY").stderr
    )


def test_the_model_of_a_folder_is_run_by_the_embedded_engine(folder: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'agl-framework[grpo]'")
    from tests.algorithm.parts import save_untrained_model

    model = str(save_untrained_model(folder / "model"))
    words = ("env", "try", "mine.py:sums", "--tasks", "2", "--max-tokens", "4", "--store", "agl.db", "--model", model)
    done = shell(*words, cwd=folder)
    assert (done.returncode, done.stdout.count("\nassistant: ")) == (0, 2), done.stderr
    [rollout, _] = json.loads(shell("rollouts", "list", "--store", "agl.db", "--json", cwd=folder).stdout)
    explained = shell("rollouts", "explain", rollout["rollout_id"], "--store", "agl.db", "--json", cwd=folder)
    assert [(call["state"], call["out"]) for call in json.loads(explained.stdout)["calls"]] == [("ok", "4")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_try_and_leaves_nothing(
    number: int, code: int, folder: Path, server: ModelServer, terminal: Terminal
) -> None:
    server.answer = lambda request: (server.hold(), "wait")[1]
    process = terminal(["agl", "env", "try", "mine.py:sums", "--model", server.base_url])
    server.wait_until(lambda calls: len(calls) == 2, timeout=60)
    assert process.interrupted(number) == code
    assert "Traceback" not in process.said
    assert left(folder) == ["mine.py"]


# --- wrong input -----------------------------------------------------------------------------------------------------


def wrong(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["env", "try", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["reasoning-gim:chain_sum"], "module 'reasoning-gim' not found.*; did you mean 'reasoning-gym'"),
        (["textwrld"], "No environment 'textwrld'; did you mean 'textworld'.* Expected one of reasoning-gym, harbor"),
        (
            ["textworld"],
            r"textworld needs an agent: see examples/textworld, .* \(not installed: pip install textworld\)",
        ),
        (["reasoning-gym"], "Name a data set, such as reasoning-gym:chain_sum"),
        (["harbor:gone"], "gone is not a folder"),
        (["sub"], "use harbor:sub"),
        (["harbor:sub", "--dataset", "t.jsonl"], "--dataset is only for an agent of your own"),
        (["mine.py:sms"], "did you mean 'sums'"),
        (["mine.py:tool_user"], "mine.py:tool_user is an agent without tasks. Add --dataset tasks.jsonl"),
        (["mine.py:sums", "--dataset", "t.jsonl"], r"must be \(agent, tasks\), without --dataset"),
        (["mine.py:Silent", "--dataset", "t.jsonl"], "no tasks: the dataset is empty"),
        (["mine.py:sums", "--model", "gone"], "'gone' is neither a URL"),
        (["mine.py:sums", "--model", "sub"], "'sub' is not a checkpoint"),
        (["mine.py:sums", "--model", "sub", "--model-name", "m"], "require the URL of a model server"),
        (["mine.py:sums", "--model", "http://127.0.0.1:9/v1"], "no model server answers there"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(
    words: list[str], text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sub").mkdir()
    Path("t.jsonl").touch()
    words = words if "--model" in words else [*words, "--model", "http://127.0.0.1:9/v1"]
    assert re.search(text, wrong(capsys, *words))


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is not None, reason="reasoning-gym is installed")
def test_a_missing_package_is_named_with_the_command_that_installs_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "pip install 'agl-framework[reasoning-gym]'" in wrong(capsys, "reasoning-gym:chain_sum", "--model", "x")


def listens(server: ModelServer, models: list[str], status: int = 200) -> str:
    server.models, server.get_status = [{"id": name} for name in models], status
    return server.base_url


def odd(server: ModelServer) -> str:
    server.models = ["m"]  # pyright: ignore[reportAttributeAccessIssue] -- not a list of models
    return server.base_url


SERVERS: list[tuple[Callable[[ModelServer], str], list[str], str]] = [
    (lambda server: listens(server, ["a", "b"]), [], "lists the models a, b. Set --model-name"),
    (lambda server: listens(server, [], 401), [], r"refuses the key \(status 401\). Set --api-key VARIABLE"),
    (
        lambda server: listens(server, [], 404).removesuffix("/v1"),
        [],
        r"lists no models \(status 404\). .*or use --model \S+/v1",
    ),
    (odd, [], "no model server answers there: "),
]


@pytest.mark.parametrize(("address", "words", "text"), SERVERS)
def test_a_server_that_has_no_such_model_is_told_before_a_task_is_run(
    address: Any, words: list[str], text: str, folder: Path, server: ModelServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(text, wrong(capsys, "mine.py:sums", "--model", address(server), *words))
    assert server.calls == []


def test_a_server_that_accepts_and_never_answers_is_given_up(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "_SECONDS_TO_ANSWER", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        assert "it did not answer within 0.2 s" in wrong(capsys, "mine.py:sums", "--model", url)
