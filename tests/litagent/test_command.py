"""Programs as agents: their environment at the start, their reward, and that no process of them is left."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import LLM, Attempt, PromptTemplate, RolloutConfig
from tests.stubs.processes import lives
from tests.stubs.running import run_tasks, run_through_gateway

KEY = "sk-of-the-provider"


def bash(script: str, **settings: Any) -> agl.CommandAgent:
    return agl.CommandAgent(["bash", "-c", textwrap.dedent(script)], **settings)


async def run_task(
    store: InMemoryLightningStore,
    agent: agl.CommandAgent,
    task: Any = None,
    config: RolloutConfig | None = None,
    **settings: Any,
) -> Attempt:
    [finished] = await run_tasks(store, agent, {} if task is None else task, config=config, **settings)
    return finished.attempt


async def reward_of(store: InMemoryLightningStore, attempt: Attempt) -> float | None:
    return agl.find_final_reward(list(await store.query_spans(attempt.rollout_id)))


async def printed(store: InMemoryLightningStore, attempt: Attempt) -> dict[str, Any]:
    """Return what the attempt keeps of the program's run."""
    [span] = [one for one in await store.query_spans(attempt.rollout_id) if one.name == "agentlightning.operation"]
    prefix = "agentlightning.operation.output."
    return {key.removeprefix(prefix): value for key, value in span.attributes.items() if key.startswith(prefix)}


# --- through the gateway -----------------------------------------------------------------------------------------

CURL = """
    question=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["question"])')
    curl -sS "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
      -H 'Content-Type: application/json' \\
      -d '{"model": "'"$OPENAI_MODEL"'", "messages": [{"role": "user", "content": "'"$question"'"}]}' > "$TMPDIR/reply"
    if grep -q 42 "$TMPDIR/reply"; then echo '{"reward": 1.0}'; else echo '{"reward": 0.0}'; fi
"""
NODE = """
    let input = '';
    for await (const chunk of process.stdin) input += chunk;
    const task = JSON.parse(input);
    const reply = await fetch(`${process.env.ANTHROPIC_BASE_URL}/v1/messages`, {
      method: 'POST',
      headers: {'content-type': 'application/json', 'x-api-key': process.env.ANTHROPIC_API_KEY},
      body: JSON.stringify({
        model: process.env.ANTHROPIC_MODEL, max_tokens: 20, messages: [{role: 'user', content: task.question}],
      }),
    });
    const answer = (await reply.json()).content[0].text;
    console.log('the model said', answer);
    console.log(JSON.stringify({reward: answer.includes('42') ? 1 : 0}));
"""


async def play_with_model(store: InMemoryLightningStore, agent: agl.CommandAgent) -> Attempt:
    task = {"question": "what is the answer"}
    [finished] = await run_through_gateway(store, agent, task, answer=lambda request: "it is 42")
    return finished.attempt


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_a_shell_script_learns_through_the_gateway(
    store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_TOKEN", "a secret of the machine")
    attempt = await play_with_model(store, bash(CURL))
    assert (attempt.outcome, attempt.error) == ("scored", None)
    assert await reward_of(store, attempt) == 1.0
    spans = list(await store.query_spans(attempt.rollout_id))
    [triplet] = agl.TracerTraceToTriplet().adapt(spans)
    assert triplet.reward == 1.0
    assert triplet.response["token_ids"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_a_program_samples_as_the_algorithm_says(store: InMemoryLightningStore) -> None:
    requests: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> str:
        requests.append(request)
        return "it is 42"

    sampling = {"temperature": 0.25, "max_tokens": 7}
    await run_through_gateway(store, bash(CURL), {"question": "what"}, answer=answer, sampling=sampling)
    [sent] = requests
    assert (sent["temperature"], sent["max_tokens"]) == (0.25, 7)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node (Debian package nodejs)")
async def test_a_node_program_learns_through_the_gateway(store: InMemoryLightningStore) -> None:
    agent = agl.CommandAgent(["node", "--input-type=module", "-e", NODE])
    attempt = await play_with_model(store, agent)
    assert (attempt.outcome, attempt.error) == ("scored", None)
    assert await reward_of(store, attempt) == 1.0
    assert (await printed(store, attempt))["stdout"].startswith("the model said it is 42\n")
    assert agl.TracerTraceToTriplet().adapt(list(await store.query_spans(attempt.rollout_id)))[0].reward == 1.0


# --- what it finds -----------------------------------------------------------------------------------------------


async def test_the_environment_is_empty_but_for_what_is_listed(
    store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AGL_TOKEN", "PROVIDER_API_KEY", "WANTED", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"value of {name}")
    await store.add_resources(
        {"other": LLM(endpoint="http://o/v1", model="o"), "main": LLM(endpoint="http://m/v1", model="m", api_key=KEY)}
    )
    agent = bash("env; echo 1", pass_env=["WANTED", "NOT_SET"], env={"MINE": "x=y"}, llm="main")
    attempt = await run_task(store, agent)
    output = await printed(store, attempt)
    variables = dict(line.split("=", 1) for line in output["stdout"].splitlines() if "=" in line)
    assert variables["OPENAI_BASE_URL"] == variables["OPENAI_API_BASE"] == "http://m/v1"
    assert variables["ANTHROPIC_BASE_URL"] == "http://m"
    assert variables["OPENAI_MODEL"] == variables["ANTHROPIC_MODEL"] == variables["AGL_MODEL"] == "m"
    assert variables["OPENAI_API_KEY"] == variables["ANTHROPIC_API_KEY"] == "[key]", "keys are not kept"
    assert (variables["AGL_ROLLOUT_ID"], variables["AGL_ATTEMPT_ID"]) == (attempt.rollout_id, attempt.attempt_id)
    assert (variables["WANTED"], variables["MINE"]) == ("value of WANTED", "x=y")
    assert not {"AGL_TOKEN", "PROVIDER_API_KEY", "HTTPS_PROXY", "NOT_SET", "PYTEST_CURRENT_TEST"} & set(variables)


async def test_task_and_resources_lie_in_files_of_the_attempt_alone(store: InMemoryLightningStore) -> None:
    await store.add_resources({"prompt": PromptTemplate(template="Say {x}", engine="f-string")})
    script = "cat $AGL_TASK_FILE; cat; stat -c %a $TMPDIR; cat $AGL_RESOURCES_FILE; echo; echo $TMPDIR; echo 1"
    attempt = await run_task(store, bash(script, task="file"), {"né": [1, None]})
    task, mode, resources, folder, _ = (await printed(store, attempt))["stdout"].splitlines()
    assert json.loads(task) == {"né": [1, None]}
    assert mode == "700"
    assert json.loads(resources)["prompt"]["template"] == "Say {x}"
    assert Path(folder).name not in os.listdir(tempfile.gettempdir())


async def test_a_model_that_is_named_and_missing_is_a_fault_that_lists_what_there_is(
    store: InMemoryLightningStore,
) -> None:
    await store.add_resources({"other": LLM(endpoint="http://o/v1", model="o")})
    attempt = await run_task(store, bash("echo 1", llm="main"))
    assert attempt.outcome == "infrastructure_fault"
    assert attempt.error is not None
    assert "llm='main' is not the name of an LLM resource; published: other (llm)" in attempt.error.message


async def test_a_program_that_is_not_there_is_named_with_the_places_searched(store: InMemoryLightningStore) -> None:
    attempt = await run_task(store, agl.CommandAgent(["no-such-program"]))
    assert attempt.outcome == "infrastructure_fault"
    assert attempt.error is not None
    assert "'no-such-program' cannot be started: no executable file with this name" in attempt.error.message
    elsewhere = await run_task(store, bash("echo 1", cwd="/no/such/folder"))
    assert elsewhere.error is not None
    assert elsewhere.error.message == "cwd='/no/such/folder' is not a folder on this machine"


async def test_it_runs_in_the_folder_that_is_named(store: InMemoryLightningStore, tmp_path: Path) -> None:
    attempt = await run_task(store, bash("pwd; echo 1", cwd=tmp_path))
    assert (await printed(store, attempt))["stdout"].splitlines()[0] == str(tmp_path)


# --- how it says its reward --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "settings", "reward"),
    [
        ("echo 0.5", {}, 0.5),
        ('echo \'{"reward": 0.25, "steps": 3}\'; echo done; echo more >&2', {}, 0.25),
        ('echo \'{"reward": {"reward": 0.75, "style": 0.1}}\'', {}, 0.75),
        ("echo null", {}, None),
        ("echo 3", {"reward": "none"}, None),
        ("echo 0.5 > $AGL_REWARD_FILE", {"reward": "file"}, 0.5),
        ("true", {"reward": "exit_code"}, 1.0),
        ("false", {"reward": "exit_code"}, 0.0),
        ("exit 7", {"reward": {7: 0.7}}, 0.7),
    ],
)
async def test_each_way_to_say_a_reward(
    store: InMemoryLightningStore, script: str, settings: dict[str, Any], reward: float | None
) -> None:
    attempt = await run_task(store, bash(script, **settings))
    assert (attempt.outcome, attempt.error) == ("unscored" if reward is None else "scored", None)
    assert await reward_of(store, attempt) == reward


async def test_the_output_may_go_to_the_reward_fn(store: InMemoryLightningStore) -> None:
    def judge(output: agl.ProgramOutput, task: dict[str, str]) -> float:
        assert output.exit_code == 3
        return float(output.stdout.strip() == task["answer"])

    agent = bash("echo Paris; exit 3", reward="reward_fn")
    attempt = await run_task(store, agent, {"answer": "Paris"}, reward_fn=judge)
    assert await reward_of(store, attempt) == 1.0
    unjudged = await run_task(store, agent)
    assert unjudged.outcome_reason == "invalid_result"


@pytest.mark.parametrize(
    ("script", "settings", "reason", "message"),
    [
        ("echo oh no >&2; exit 3", {}, "exception", "ended with exit code 3. Its last output: oh no"),
        ("echo 1; kill -9 $$", {}, "exception", "was ended by signal 9"),
        ("exit 2", {"reward": "exit_code"}, "exception", "only these exit codes have a reward: 0, 1"),
        ("echo hello", {}, "invalid_result", "has no line such as"),
        ("echo '{\"score\": 1}'", {}, "invalid_result", "got score"),
        ("echo NaN", {}, "invalid_reward", "finite"),
        ("echo 1e308 > $AGL_REWARD_FILE", {"reward": "file"}, "invalid_reward", "at most 1e+15 in magnitude"),
        (f"echo 1{'0' * 400} > $AGL_REWARD_FILE", {"reward": "file"}, "invalid_reward", "at most 1e+15 in magnitude"),
        ('echo \'{"reward": {"reward": 1, "style": -1e308}}\'', {}, "invalid_reward", "at most 1e+15 in magnitude"),
        ("true", {"reward": "file"}, "invalid_result", "did not write the file"),
        ("echo x > $AGL_REWARD_FILE", {"reward": "file"}, "invalid_result", "is not valid JSON"),
    ],
)
async def test_what_is_no_reward_is_a_fault_and_never_a_low_reward(
    store: InMemoryLightningStore, script: str, settings: dict[str, Any], reason: str, message: str
) -> None:
    attempt = await run_task(store, bash(script, **settings))
    assert (attempt.outcome, attempt.outcome_reason) == ("infrastructure_fault", reason)
    assert attempt.error is not None
    assert message in attempt.error.message
    assert await reward_of(store, attempt) is None


async def test_a_failure_may_be_declared_the_fault_of_the_policy(store: InMemoryLightningStore) -> None:
    attempt = await run_task(store, bash("exit 1"), policy_faults={agl.ProgramFailed: -1.0})
    assert attempt.outcome == "policy_fault"
    assert await reward_of(store, attempt) == -1.0


# --- bounds ------------------------------------------------------------------------------------------------------


async def test_the_end_of_a_long_output_is_kept_and_read(store: InMemoryLightningStore) -> None:
    script = "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo 0.5; head -c 3000000 /dev/zero | tr '\\0' y >&2"
    attempt = await run_task(store, bash(script, max_output_bytes=2000))
    assert await reward_of(store, attempt) == 0.5
    output = await printed(store, attempt)
    assert (len(output["stdout"]), len(output["stderr"])) == (2000, 2000)
    assert output["dropped_bytes"] == 6_000_005 - 4000


async def test_a_program_that_does_not_read_a_large_task_is_no_error(store: InMemoryLightningStore) -> None:
    attempt = await run_task(store, bash("exec 0<&-; echo 1"), {"text": "x" * 1_000_000})
    assert attempt.outcome == "scored"


HANGS = "trap '' TERM; sleep 600 & echo $! $$; wait; wait; sleep 600"


@pytest.mark.parametrize("owner", ["rollout", "command"])
async def test_at_its_time_limit_the_whole_group_is_killed_and_the_output_kept(
    store: InMemoryLightningStore, owner: str
) -> None:
    limit = {"timeout_seconds": 0.4, "stop_seconds": 0.1}
    agent = bash(HANGS, **(limit if owner == "command" else {}))
    config = RolloutConfig(timeout_seconds=0.4) if owner == "rollout" else None
    attempt = await run_task(store, agent, config=config)
    assert (attempt.status, attempt.outcome, attempt.outcome_reason) == ("timeout", "cancelled", "timeout")
    output = await printed(store, attempt)
    assert output["exit_code"] == -signal.SIGKILL
    assert not [pid for pid in output["stdout"].split() if lives(int(pid))]


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"command": "node agent.js"}, TypeError, r"a list .* such as \['node', 'agent.js'\]; got 'node agent.js'"),
        ({"command": []}, ValueError, "command must hold the program"),
        ({"command": ["node", 3]}, ValueError, "command must hold the program and its arguments as strings"),
        ({"command": ["a\0b"]}, ValueError, "NUL character"),
        ({"task": "argv"}, ValueError, "task must be one of 'stdin', 'file'; got 'argv'"),
        ({"reward": "stdout"}, ValueError, "reward must be one of last_line, file, exit_code, .*; got 'stdout'"),
        ({"reward": len}, TypeError, "Pass it to the Trainer as reward_fn"),
        ({"reward": {}}, ValueError, "at least one exit code"),
        ({"reward": {"0": 1.0}}, TypeError, "must map exit codes to rewards"),
        ({"reward": {0: float("nan")}}, ValueError, r"reward\[0\] must be a finite number"),
        ({"llm": 3}, TypeError, "llm must be the name of a resource"),
        ({"env": ["A=1"]}, TypeError, "env must be a mapping"),
        ({"env": {"A": 1}}, TypeError, "env must be a mapping of variables to strings; got 'A': 1"),
        ({"env": {"A=B": "1"}}, ValueError, "not a variable name"),
        ({"env": {"OPENAI_API_KEY": "x"}}, ValueError, "OPENAI_API_KEY, which is set for each attempt"),
        ({"pass_env": "HOME"}, TypeError, "pass_env must be a list"),
        ({"pass_env": ["ANTHROPIC_API_KEY"]}, ValueError, "ANTHROPIC_API_KEY, which is set for each attempt"),
        ({"timeout_seconds": 0}, ValueError, "timeout_seconds must be more than 0 seconds"),
        ({"timeout_seconds": "1"}, TypeError, "timeout_seconds must be a number of seconds"),
        ({"stop_seconds": float("inf")}, ValueError, "stop_seconds must be a finite number of seconds"),
        ({"max_output_bytes": 10}, ValueError, "max_output_bytes must be at least 1024; got 10"),
        ({"max_output_bytes": 2048.0}, TypeError, "max_output_bytes must be a whole number"),
    ],
)
def test_a_wrong_setting_is_an_error_at_construction(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        agl.CommandAgent(**{"command": ["true"], **settings})


def test_a_path_is_a_program_and_an_agent_travels_to_other_processes(tmp_path: Path) -> None:
    agent = agl.CommandAgent(["true"], reward={0: 0.5}, timeout_seconds=3)
    assert pickle.loads(pickle.dumps(agent)).__getstate__() == agent.__getstate__()
    assert agl.CommandAgent([tmp_path / "agent", "-v"]).command == (os.fspath(tmp_path / "agent"), "-v")
