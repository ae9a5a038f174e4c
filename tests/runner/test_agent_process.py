"""`isolation="process"`: the agent runs where it can be killed; everything else is the same as in this process."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import hashlib
import inspect
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pydantic_core
import pytest
from typing_extensions import override

import agentlightning as agl
from agentlightning.emitter import emit_message, emit_reward
from agentlightning.litagent import LitAgent, rollout
from agentlightning.runner import LitAgentRunner
from agentlightning.runner import agent_process as process
from agentlightning.runner.agent_process import AgentProcessDied
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import AttemptedRollout, Hook, RolloutConfig, Span, Triplet
from tests.stubs.running import run_tasks as run_tasks_here


class OutOfLuck(Exception):
    """An exception that cannot be copied."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Actor(LitAgent[Any]):
    needs_resources = False

    @override
    def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
        if task == "pid":
            emit_message(str(os.getpid()))
            return 1.0
        if task == "emit":
            emit_reward(0.25)
            return None
        if task == "triplets":
            return [Triplet(prompt={"token_ids": [1]}, response={"token_ids": [2]}, reward=0.75)]
        if task == "tracer":
            return float(self.tracer.get_last_trace() == [])
        if task == "exit":
            os._exit(7)
        if task == "crash":
            ctypes.string_at(0)
        if task == "lambda":
            return lambda: None
        raise {"zero": ZeroDivisionError("mine"), "policy": agl.PolicyFault("bad", reward=-1.0)}.get(task) or OutOfLuck(
            1, 2
        )


class Stubborn(LitAgent[Any]):
    """Ignores its time limit and SIGTERM; with a program that does the same."""

    needs_resources = False

    @override
    def rollout(self, task: str, resources: Any, rollout: Any) -> float:
        helper = subprocess.Popen(["sleep", "600"])
        if task.startswith("pipe "):
            Path(task.removeprefix("pipe ")).write_text(f"{os.getpid()} {helper.pid}")
        emit_message(f"{os.getpid()} {helper.pid}")
        if task == "holds the interpreter":
            ctypes.PyDLL(None).sleep(600)
        while True:
            time.sleep(0.01)

    @override
    async def validation_rollout_async(self, task: str, resources: Any, rollout: Any) -> float:
        time.sleep(600)  # noqa: ASYNC251 -- the mistake that a process makes up for
        return 1.0


run_tasks = partial(run_tasks_here, isolation="process")


def said(finished: AttemptedRollout) -> tuple[Any, ...]:
    attempt = finished.attempt
    return attempt.outcome, attempt.outcome_reason, attempt.error.type if attempt.error else None


async def reward(store: InMemoryLightningStore, finished: AttemptedRollout) -> float | None:
    return agl.find_final_reward(list(await store.query_spans(finished.rollout_id)))


async def test_an_agent_in_a_process_ends_in_all_the_ways_of_one_that_is_here(store: InMemoryLightningStore) -> None:
    class Looking(Hook):
        seen: list[int]

        async def on_rollout_end(self, *, spans: list[Span], **_: Any) -> None:
            self.seen.append(len(spans))

    hook = Looking()
    hook.seen = []
    tasks = ["pid", "pid", "emit", "triplets", "tracer", "zero", "policy", "luck", "lambda", "exit", "crash", "pid"]
    finished = dict(zip([*tasks[:-1], "last"], await run_tasks(store, Actor(), *tasks, hooks=[hook]), strict=True))
    assert {name: said(one) for name, one in finished.items()} == {
        "pid": ("scored", None, None),
        "emit": ("scored", None, None),
        "triplets": ("scored", None, None),
        "tracer": ("scored", None, None),
        "zero": ("infrastructure_fault", "exception", "ZeroDivisionError"),
        "policy": ("policy_fault", "policy_fault", "agentlightning.errors.PolicyFault"),
        "luck": ("infrastructure_fault", "exception", "agentlightning.runner.pipe.AgentRaised"),
        "lambda": ("infrastructure_fault", "invalid_result", "agentlightning.runner.outcome.InvalidResult"),
        "exit": ("infrastructure_fault", "runner_died", "agentlightning.runner.agent_process.AgentProcessDied"),
        "crash": ("infrastructure_fault", "runner_died", "agentlightning.runner.agent_process.AgentProcessDied"),
        "last": ("scored", None, None),
    }
    rewards = [await reward(store, finished[name]) for name in ("emit", "triplets", "tracer", "policy")]
    assert rewards == [0.25, 0.75, 1.0, -1.0]
    assert [hook.seen[0], hook.seen[2], hook.seen[3]] == [2, 1, 2]

    errors = {name: one.attempt.error for name, one in finished.items() if one.attempt.error is not None}
    assert "raise {" in (errors["zero"].traceback or ""), "the line that raised, in the other process"
    assert errors["luck"].message == "OutOfLuck: 1 and 2"
    assert "ended with exit code 7 during the attempt" in errors["exit"].message
    assert "was ended by SIGSEGV during the attempt" in errors["crash"].message

    spans = [(await store.query_spans(one.rollout_id)).items[0] for one in finished.values() if one.input == "pid"]
    pids = [agl.get_message_value(span) for span in spans]
    assert len(set(pids)) == 2, "a process is used again, and replaced when it has died"
    assert str(os.getpid()) not in pids
    assert not [pid for pid in pids if psutil.pid_exists(int(pid or 0))]


async def test_agents_that_ignore_their_time_limit_are_killed_with_all_that_they_started(
    store: InMemoryLightningStore,
) -> None:
    modes = {"ignores it": None, "holds the interpreter": None, "blocks the loop": "val"}
    config = RolloutConfig(timeout_seconds=1.0)
    for task, mode in modes.items():
        await store.enqueue_rollout(input=task, mode=mode, config=config)
    runner = LitAgentRunner[Any](agl.OtelTracer(), max_rollouts=3, concurrency=3, isolation="process")
    with runner.run_context(agent=Stubborn(), store=store):
        await runner.iter()
    attempts = {one.input: one.attempt for one in await store.query_rollouts() if isinstance(one, AttemptedRollout)}
    assert {task: (one.status, one.outcome, one.outcome_reason) for task, one in attempts.items()} == dict.fromkeys(
        modes, ("timeout", "cancelled", "timeout")
    )
    [message] = await store.query_spans(attempts["ignores it"].rollout_id)
    pids = [int(pid) for pid in (agl.get_message_value(message) or "").split()]
    assert len(pids) == 2, "what it had recorded was told before it was killed"
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


class Tidy(LitAgent[Any]):
    """Has something to do at the end of its process."""

    needs_resources = False

    @override
    def rollout(self, task: str, resources: Any, rollout: Any) -> float:
        atexit.register(Path(task).write_text, "done")
        return 1.0


async def test_a_process_that_has_nothing_to_do_ends_in_order(store: InMemoryLightningStore, tmp_path: Path) -> None:
    await run_tasks(store, Tidy(), str(tmp_path / "note"))
    assert (tmp_path / "note").read_text() == "done"


class Unwelcome(LitAgent[Any]):
    """Cannot be loaded elsewhere."""

    needs_resources = False

    def __reduce__(self) -> Any:
        return os._exit, (3,)


async def test_an_agent_that_cannot_be_loaded_in_its_process_ends_the_runner_before_it_claims(
    store: InMemoryLightningStore,
) -> None:
    with pytest.raises(AgentProcessDied, match=r"exit code 3 before it was ready. Check in its error output"):
        await run_tasks(store, Unwelcome(), "x")
    assert (await store.query_rollouts(status_in=["queuing"])).total == 1


def test_an_agent_that_cannot_travel_is_refused_with_the_ways_out(store: InMemoryLightningStore) -> None:
    runner = LitAgentRunner[Any](agl.OtelTracer(), isolation="process")
    with pytest.raises(TypeError, match=r"isolation='process' sends the agent to a separate process, but"):
        runner.init(rollout(lambda task: 1.0))
    with pytest.raises(ValueError, match="isolation must be one of 'thread', 'process'; got 'fork'"):
        LitAgentRunner[Any](agl.OtelTracer(), isolation="fork")


RUNNER = """
import asyncio, sys
import agentlightning as agl
from tests.runner.test_agent_process import Stubborn

async def main():
    runner = agl.LitAgentRunner(agl.OtelTracer(), isolation="process")
    with runner.run_context(agent=Stubborn(), store=agl.InMemoryLightningStore()):
        await runner.step("pipe " + sys.argv[1])

asyncio.run(main())
"""


@pytest.mark.slow
def test_no_process_of_an_agent_outlives_a_runner_that_is_killed(tmp_path: Path) -> None:
    pipe = tmp_path / "pids"
    os.mkfifo(pipe)
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", RUNNER, str(pipe)], cwd=root) as runner:
        agents = [psutil.Process(int(pid)) for pid in pipe.read_text().split()]
        runner.send_signal(signal.SIGKILL)
        processes, alive = psutil.wait_procs(agents, timeout=20)
    assert (len(processes), alive) == (2, [])


# --- what an agent may do from there ---------------------------------------------------------------------------------


class Mapped(Exception):
    """A class that the runner knows, with more than a message."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.code)


class Unpickled:
    """Records where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return _note_pid, (self.path,)


class UnpickledError(Exception):
    def __reduce__(self) -> Any:
        return _note_pid, (str(self),)


def _note_pid(path: str) -> str:
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    return path


def _pipe() -> socket.socket:
    """The pipe to the runner, which any code in the process can find."""
    return next(each for each in gc.get_objects() if type(each).__name__ == "_AttemptServer")._pipe


class Intruder(LitAgent[Any]):
    """Attacks its runner in the way that its task names."""

    needs_resources = False

    @override
    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
        what, argument = task
        if what == "return":
            return Unpickled(argument)
        if what == "raise":
            raise UnpickledError(argument)
        if what == "send pickle":
            _pipe().sendall(pickle.dumps(Unpickled(argument)) + b"\n")
            time.sleep(60)  # noqa: ASYNC251 -- it is killed
        if what == "send":
            _pipe().sendall(argument.encode() + b"\n")
            time.sleep(60)  # noqa: ASYNC251 -- it is killed
        if what == "flood":
            with contextlib.suppress(OSError):
                while True:
                    _pipe().sendall(b"x" * 65536)
        if what == "store":
            refused: dict[str, str] = {}
            store: Any = self.runner.get_store()  # pyright: ignore[reportAttributeAccessIssue] -- a LitAgentRunner
            for name, (operation, args) in attacks(argument).items():
                try:
                    await getattr(store, operation)(*args)
                except ValueError as error:
                    refused[name] = type(error).__name__
            emit_message(json.dumps(refused))
            own = (rollout.rollout_id, rollout.attempt.attempt_id)
            number = await store.get_next_span_sequence_id(*own)
            await store.add_span(_span(*own, "added", number))
            names = [span.name for span in await store.query_spans(own[0])]
            stored_rollout = await store.get_rollout_by_id(own[0])
            return float(names == ["added"] and stored_rollout.attempt.attempt_id == own[1])
        if what == "ask":
            operation, arguments = argument
            server = next(each for each in gc.get_objects() if type(each).__name__ == "_AttemptServer")
            answer = asyncio.get_running_loop().create_future()
            server._pending[-1] = answer
            line = json.dumps({"number": -1, "operation": operation, "arguments": arguments})
            _pipe().sendall(line.encode() + b"\n")
            await answer
        if what == "secrets":
            digests = {
                hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
                for each in gc.get_objects()
                if type(each) is dict
                for text in each.values()
                if type(text) is str
            }
            return float(argument in digests)
        return 1.0


def _span(rollout_id: str, attempt_id: str, name: str, number: int = -1) -> Span:
    return Span.from_attributes(
        rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=number, name=name, attributes={}
    )


def attacks(other: list[str]) -> dict[str, tuple[str, list[Any]]]:
    """Return calls of the store that an agent must not make; `other` is another rollout with its attempt."""
    return {
        "cancel": ("update_rollout", [other[0], None, "cancelled"]),
        "finish": ("finish_rollout", [other[0]]),
        "delete": ("delete_rollouts", [[other[0]]]),
        "publish": ("add_resources", [{}]),
        "keys": ("get_latest_resources", []),
        "queue": ("enqueue_rollout", ["more"]),
        "claim": ("dequeue_rollout", []),
        "list": ("query_rollouts", []),
        "read": ("query_spans", other),
        "read one": ("get_span", [*other, "0" * 16]),
        "look": ("get_rollout_by_id", other[:1]),
        "write": ("add_span", [_span(other[0], other[1], "forged")]),
        "write many": ("add_many_spans", [[_span(other[0], other[1], "forged")]]),
        "number": ("get_next_span_sequence_id", other),
        "numbers": ("get_many_span_sequence_ids", [[other]]),
    }


async def _other(store: InMemoryLightningStore) -> list[str]:
    other = await store.start_rollout("of somebody else")
    return [other.rollout_id, other.attempt.attempt_id]


async def test_an_agent_in_a_process_has_the_store_for_its_own_attempt_only(store: InMemoryLightningStore) -> None:
    other = await _other(store)
    [finished] = await run_tasks(store, Intruder(), ("store", other))
    assert (said(finished)[0], await reward(store, finished)) == ("scored", 1.0)
    [message] = await store.query_spans(finished.rollout_id, name="agentlightning.message")
    refused = json.loads(agl.get_message_value(message) or "")
    assert refused == dict.fromkeys(attacks(other), "BadRequestError")


async def test_and_also_when_it_speaks_to_the_runner_itself(store: InMemoryLightningStore) -> None:
    other = await _other(store)
    calls = {**attacks(other), **{name: (name, []) for name in ("close", "_call", "engine")}}
    tasks: list[Any] = []
    for operation, args in calls.values():
        by_name = dict(zip(inspect.signature(getattr(store, operation, print)).parameters, args, strict=False))
        tasks.append(("ask", [operation, json.loads(pydantic_core.to_json(by_name))]))
    finished = dict(zip(calls, await run_tasks(store, Intruder(), *tasks), strict=True))
    refused = ("infrastructure_fault", "exception", "agentlightning.errors.BadRequestError")
    assert {name: said(one) for name, one in finished.items()} == dict.fromkeys(calls, refused)
    untouched = await store.get_rollout_by_id(other[0])
    assert untouched is not None
    assert untouched.status == "preparing"
    assert (await store.query_spans(other[0])).total == 0
    assert (await store.query_rollouts()).total == 1 + len(calls)


@pytest.mark.parametrize("what", ["return", "raise", "send pickle"])
async def test_nothing_that_an_agent_sends_is_unpickled_by_the_runner(
    store: InMemoryLightningStore, tmp_path: Path, what: str
) -> None:
    note = tmp_path / "pids"
    note.touch()
    finished, after = await run_tasks(store, Intruder(), (what, str(note)), ("nothing", None))
    assert said(finished)[0] == "infrastructure_fault"
    assert str(os.getpid()) not in note.read_text().split()
    assert said(after)[0] == "scored"


NO_MESSAGES = (
    *("", "7", "[]", "{}", '"ready"', "[" * 100_000, '{"operation": "add_span"}'),
    '{"operation": 5, "number": "x", "arguments": []}',
    '{"value": null, "error": null}',
    '{"value": ["spans", [{"name": 1}]], "error": null, "traceback": ""}',
    '{"value": ["program", {}], "error": null, "traceback": ""}',
    '{"value": ["json", [{}]], "error": null, "traceback": "", "more": ' + "9" * 5000 + "}",
    '{"value": null, "error": {"module": 1}, "traceback": ""}',
)


async def test_what_is_no_message_ends_the_process_and_the_runner_goes_on(store: InMemoryLightningStore) -> None:
    tasks = [("send", line) for line in NO_MESSAGES]
    *finished, after = await run_tasks(store, Intruder(), *tasks, ("nothing", None))
    assert {line[:50]: said(one)[:2] for line, one in zip(NO_MESSAGES, finished, strict=True)} == dict.fromkeys(
        [line[:50] for line in NO_MESSAGES], ("infrastructure_fault", "exception")
    )
    assert said(after)[0] == "scored"


async def test_a_process_that_sends_without_end_is_killed(
    store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MOST_BYTES", 1 << 20)
    finished, after = await run_tasks(store, Intruder(), ("flood", None), ("nothing", None))
    assert said(finished)[:2] == ("infrastructure_fault", "exception")
    assert finished.attempt.error is not None
    assert "sent more than 1048576 bytes for one attempt" in finished.attempt.error.message
    assert said(after)[0] == "scored"


async def test_a_store_that_the_tracer_was_given_does_not_go_along(store: InMemoryLightningStore) -> None:
    token = f"token-{os.urandom(12).hex()}"
    made = await store.enqueue_rollout(input=("secrets", hashlib.sha256(token.encode()).hexdigest()))
    tracer = agl.OtelTracer(agl.LightningStoreClient("http://127.0.0.1:9", token=token))
    runner = LitAgentRunner[Any](tracer, max_rollouts=1, isolation="process")
    with runner.run_context(agent=Intruder(), store=store):
        await runner.iter()
    finished = await store.get_rollout_by_id(made.rollout_id)
    assert isinstance(finished, AttemptedRollout)
    assert (said(finished)[0], await reward(store, finished)) == ("scored", 0.0)


# --- what travels ----------------------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "text": "4",
    "tuple": ("a", 1),
    "nested": {"answer": [1, 2.5, None, True, {"x": ("y", [])}], "list": ["list", "tuple"], "half": "\ud800"},
    "numbers": {"whole": 3, "part": float("inf")},
}


@agl.rollout
def gives(task: str) -> Any:
    if task == "unknown class":
        return Unpickled("x")
    if task == "unknown key":
        return {1: 2}
    return VALUES[task]


async def test_values_for_a_reward_fn_arrive_as_they_were_returned(store: InMemoryLightningStore) -> None:
    arrived: list[Any] = []

    def scores(output: Any) -> float:
        arrived.append(output)
        return 1.0

    finished = await run_tasks(store, gives, *VALUES, "unknown class", "unknown key", reward_fn=scores)
    assert arrived == [*VALUES.values()]
    invalid = ("infrastructure_fault", "invalid_result", "agentlightning.runner.outcome.InvalidResult")
    assert [said(each) for each in finished] == [("scored", None, None)] * len(VALUES) + [invalid] * 2
    assert finished[-2].attempt.error is not None
    assert "Unpickled is not supported; supported are None" in finished[-2].attempt.error.message


async def test_the_output_of_a_program_arrives_for_a_reward_fn(store: InMemoryLightningStore) -> None:
    def scores(output: agl.ProgramOutput) -> float:
        return float(output.stdout)

    agent = agl.CommandAgent(["echo", "0.25"], reward="reward_fn")
    [finished] = await run_tasks(store, agent, "x", reward_fn=scores)
    assert await reward(store, finished) == 0.25


RAISED: dict[str, Any] = {
    "file": lambda: open("/no such file"),  # noqa: SIM115 -- it raises
    "key": lambda: {}["x"],
    "json": lambda: json.loads("{"),
    "exit": lambda: sys.exit("early"),
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt("mine")),
    "mapped": lambda: (_ for _ in ()).throw(Mapped("mine", 3)),
    "local": lambda: (_ for _ in ()).throw(type("Local", (Exception,), {})("unknown")),
    "long": lambda: (_ for _ in ()).throw(ValueError("x" * 1_000_000)),
}


@agl.rollout
def fails(task: str) -> Any:
    return RAISED[task]()


async def test_exceptions_arrive_with_class_message_and_attributes(store: InMemoryLightningStore) -> None:
    class Looking(Hook):
        seen: list[BaseException]

        async def on_rollout_error(self, *, error: BaseException, **_: Any) -> None:
            self.seen.append(error)

    hook = Looking()
    hook.seen = []
    mapping: Any = {Mapped: -0.5}
    finished = await run_tasks(store, fails, *RAISED, hooks=[hook], policy_faults=mapping)
    outcomes = {each.input: said(each)[0] for each in finished}
    assert outcomes == {name: "policy_fault" if name == "mapped" else "infrastructure_fault" for name in RAISED}
    errors = dict(zip(RAISED, hook.seen, strict=True))
    assert {name: type(error).__name__ for name, error in errors.items()} == {
        "file": "FileNotFoundError",
        "key": "KeyError",
        "json": "JSONDecodeError",
        "exit": "SystemExit",
        "interrupt": "AgentRaised",
        "mapped": "Mapped",
        "local": "AgentRaised",
        "long": "ValueError",
    }
    assert str(errors["file"]) == "[Errno 2] No such file or directory: '/no such file'"
    assert (str(errors["key"]), str(errors["interrupt"]), str(errors["local"])) == (
        "'x'",
        "KeyboardInterrupt: mine",
        "Local: unknown",
    )
    assert (str(errors["mapped"]), vars(errors["mapped"])) == ("mine", {"code": 3})
    assert isinstance(errors["json"], json.JSONDecodeError)
    assert errors["json"].pos == 1
