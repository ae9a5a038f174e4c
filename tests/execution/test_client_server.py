"""Client-server: processes around a store server, watched, restarted and always ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentlightning as agl
from agentlightning.errors import RunnerDiedError, StoreUnreachableError
from agentlightning.execution import (
    AlgorithmDiedError,
    ClientServerExecutionStrategy,
    ExecutionEvent,
    StrandedWorkError,
)
from agentlightning.execution.team import restart_pause
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient, LightningStoreServer
from agentlightning.types import RolloutConfig
from tests.execution.bundles import (
    AtWork,
    DieOnce,
    Serve,
    Tasks,
    blocking_runner,
    broken_algorithm,
    broken_runner,
    deaf_runner,
    killed_at_the_end,
    patient_algorithm,
    until_one_is_at_work,
)
from tests.stubs.ports import free_port
from tests.stubs.running import serving

START_METHODS = ["fork", "spawn", "forkserver"]


def strategy(**settings: Any) -> ClientServerExecutionStrategy:
    """Return a strategy with times for a busy machine; a process that obeys ends long before."""
    defaults: dict[str, Any] = {"server_port": 0, "graceful_timeout": 15.0, "terminate_timeout": 5.0}
    return ClientServerExecutionStrategy(**{**defaults, **settings})


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def used_port(port: int) -> Iterator[int]:
    """A port at which another program listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        yield port


def children() -> list[psutil.Process]:
    """Child processes, but for those that `multiprocessing` keeps for the life of the interpreter."""
    alive: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if child.status() != psutil.STATUS_ZOMBIE and not any("multiprocessing" in w for w in child.cmdline()):
                alive.append(child)
    return alive


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = {child.pid for child in children()}  # servers that tests elsewhere share
    yield
    assert not [child for child in children() if child.pid not in before]


# --- the ordinary course ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_method", START_METHODS)
def test_execute_returns_what_the_algorithm_returned_and_runners_are_other_processes(start_method: str) -> None:
    pids = strategy(n_runners=2, start_method=start_method).execute(Tasks(), Serve(), FreshStore())
    assert len(pids) == 4
    assert os.getpid() not in pids


@pytest.mark.parametrize("start_method", START_METHODS)
def test_with_the_runner_in_the_main_process_the_algorithm_has_a_child_and_its_result_comes_back(
    start_method: str,
) -> None:
    pids = strategy(main_process="runner", start_method=start_method).execute(Tasks(), Serve(), FreshStore())
    assert pids == [os.getpid()] * 4


def test_the_algorithm_gets_the_server_and_the_port_is_free_afterwards(port: int) -> None:
    async def algorithm(store: LightningStore, event: ExecutionEvent) -> type:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            return type(store)

    assert strategy(server_port=port).execute(algorithm, Serve(), InMemoryLightningStore()) is LightningStoreServer
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


async def test_an_unmanaged_store_is_handed_over_as_it_is() -> None:
    async def algorithm(store: LightningStore, event: ExecutionEvent) -> list[int]:
        assert type(store) is LightningStoreClient
        try:
            return await Tasks()(store, event)
        finally:
            await store.close()

    async with serving() as server:
        client = LightningStoreClient(server.endpoint)
        pids = await asyncio.to_thread(strategy(managed_store=False).execute, algorithm, Serve(), client)
    assert len(pids) == 4


def test_runners_that_see_the_event_are_not_signalled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "agentlightning"):
        strategy(n_runners=2).execute(Tasks(), Serve(), InMemoryLightningStore())
    assert "sending" not in caplog.text


# --- runners that die ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_runner_that_is_killed_is_restarted(start_method: str, tmp_path: Path) -> None:
    killed_once = DieOnce(mark=tmp_path / "killed")
    assert len(strategy(start_method=start_method).execute(Tasks(), killed_once, FreshStore())) == 4
    assert killed_once.mark.exists()


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_runner_that_always_fails_ends_the_run_with_worker_exit_code_and_cause(start_method: str) -> None:
    with pytest.raises(RunnerDiedError) as raised:
        strategy(max_runner_restarts=1, start_method=start_method, graceful_timeout=0.2).execute(
            patient_algorithm, broken_runner, FreshStore()
        )
    text = str(raised.value)
    assert "Subprocesses failed with unexpected exit codes: runner-" in text
    assert "(exitcode=1)" in text
    assert "restarts: 1; the limit is max_runner_restarts=1" in text
    assert "LookupError: worker" in text
    assert "bundles.py" in text


def test_the_pauses_before_restarts_double_up_to_a_ceiling() -> None:
    assert [restart_pause(deaths) for deaths in (0, 1, 2, 6, 7, 1000)] == [0.1, 0.2, 0.4, 6.4, 10.0, 10.0]


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_runner_that_is_killed_while_the_run_ends_costs_no_result(
    start_method: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = strategy(start_method=start_method).execute
    with caplog.at_level(logging.WARNING, "agentlightning"):
        assert run(until_one_is_at_work, AtWork(killed_at_the_end), FreshStore()) == "at work"
    assert "runner-0 (exitcode=-9, SIGKILL) was killed while the run was ending" in caplog.text


def test_a_runner_that_has_given_up_on_the_store_is_not_restarted() -> None:
    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        raise StoreUnreachableError("the store did not respond for 60 s")

    with pytest.raises(RunnerDiedError, match="did not respond for 60 s") as raised:
        strategy(graceful_timeout=0.2).execute(patient_algorithm, runner, InMemoryLightningStore())
    assert "restarted" not in str(raised.value)


async def exits(store: LightningStore, event: ExecutionEvent) -> None:
    raise SystemExit(3)


IMPATIENT: dict[str, Any] = {"graceful_timeout": 0.2}
STRICT: dict[str, Any] = {"graceful_timeout": 0.1, "terminate_timeout": 0.3, "allowed_exit_codes": (0,)}
HERE: dict[str, Any] = {"main_process": "runner", **IMPATIENT}
KILLED = r"runner-0 \(exitcode=-9, SIGKILL\)"
WHILE_ENDING = (until_one_is_at_work, AtWork(killed_at_the_end))
ERRORS: dict[str, tuple[dict[str, Any], Any, Any, Any, str]] = {
    "runners that end while work is open": (
        {"n_runners": 2, **IMPATIENT}, Tasks(3), Serve(cap=1), StrandedWorkError, "1 rollout still open",
    ),
    "so with the runner in the main process": (HERE, Tasks(2), Serve(cap=1), StrandedWorkError, "still open"),
    "a death while the run ends, without restarts": (
        {"max_runner_restarts": 0}, *WHILE_ENDING, RunnerDiedError, KILLED,
    ),
    "an exit code that is not allowed": (
        STRICT, until_one_is_at_work, AtWork(blocking_runner), RunnerDiedError,
        r"unexpected exit codes: runner-0 \(exitcode=-15, SIGTERM\)",
    ),
    "an algorithm that raises": (IMPATIENT, broken_algorithm, deaf_runner, TimeoutError, "the algorithm gave up"),
    "an algorithm that exits the interpreter": ({}, exits, Serve(), SystemExit, "3"),
    "a runner that fails in the main process": (HERE, patient_algorithm, broken_runner, LookupError, "found nothing"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_what_goes_wrong_comes_out_of_execute(case: str) -> None:
    settings, algorithm, runner, error, text = ERRORS[case]
    with pytest.raises(error, match=text):
        strategy(**settings).execute(algorithm, runner, InMemoryLightningStore())


def test_without_restarts_the_first_death_counts(tmp_path: Path) -> None:
    with pytest.raises(RunnerDiedError, match=f"{KILLED}: no traceback available"):
        strategy(max_runner_restarts=0, graceful_timeout=0.2).execute(
            patient_algorithm, DieOnce(mark=tmp_path / "killed"), FreshStore()
        )


def test_runners_that_ended_when_all_work_was_done_are_no_error_and_a_strategy_executes_again() -> None:
    twice = strategy()
    for _ in range(2):
        assert len(twice.execute(Tasks(3), Serve(cap=3), InMemoryLightningStore())) == 3


def test_the_death_of_the_process_that_forks_the_runners_is_noticed() -> None:
    others = {child.pid for child in children()}  # servers that tests elsewhere share

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        next(child for child in children() if child.ppid() == os.getpid() and child.pid not in others).kill()
        await patient_algorithm(store, event)

    with pytest.raises(RunnerDiedError, match=r"runner-0 \(exitcode=None\)"):
        strategy(graceful_timeout=0.2).execute(algorithm, deaf_runner, InMemoryLightningStore())


# --- algorithms that fail ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_an_algorithm_that_fails_in_a_child_is_reported_with_its_traceback(start_method: str) -> None:
    with pytest.raises(AlgorithmDiedError, match=r"algorithm \(exitcode=1\): TimeoutError: the algorithm gave up\n"):
        strategy(main_process="runner", start_method=start_method).execute(broken_algorithm, Serve(), FreshStore())


# --- escalation ----------------------------------------------------------------------------------------------------


def test_a_runner_that_ignores_the_event_is_interrupted_which_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "agentlightning"):
        run = strategy(graceful_timeout=0.1).execute
        assert run(until_one_is_at_work, AtWork(deaf_runner), InMemoryLightningStore()) == "at work"
    assert "Still running: runner-0; sending SIGINT" in caplog.text
    assert "SIGTERM" not in caplog.text


def test_a_runner_that_ignores_interrupts_is_terminated_which_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    stubborn = strategy(graceful_timeout=0.1, terminate_timeout=0.3)
    with caplog.at_level(logging.WARNING, "agentlightning"):
        assert stubborn.execute(until_one_is_at_work, AtWork(blocking_runner), InMemoryLightningStore()) == "at work"
    assert "sending SIGTERM" in caplog.text


# --- addresses and settings ------------------------------------------------------------------------------------------


def test_a_port_that_was_asked_for_and_is_taken_is_an_error_before_anything_starts(used_port: int) -> None:
    for settings in ({}, {"main_process": "runner"}):
        with pytest.raises(RuntimeError, match=f"Cannot listen on 127.0.0.1:{used_port}") as raised:
            strategy(server_port=used_port, **settings).execute(Tasks(), Serve(), InMemoryLightningStore())
        assert type(raised.value) is RuntimeError, "an algorithm that died has started"


@pytest.mark.parametrize("main_process", ["algorithm", "runner"])
def test_the_default_port_is_left_for_a_free_one_when_it_is_taken(
    main_process: str, used_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.execution.client_server.DEFAULT_PORT", used_port)
    moved = strategy(server_port=None, main_process=main_process)
    assert len(moved.execute(Tasks(1), Serve(), InMemoryLightningStore())) == 1
    with pytest.raises(
        RuntimeError, match=str(used_port)
    ):  # the role algorithm never leaves it: others look for it there
        strategy(role="algorithm", server_port=None).execute(Tasks(0), Serve(), InMemoryLightningStore())


def test_a_host_beyond_loopback_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    with pytest.raises(RuntimeError, match="AGL_TOKEN"):
        strategy(server_host="0.0.0.0").execute(Tasks(), Serve(), InMemoryLightningStore())


def test_a_wildcard_host_is_reached_over_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", "secret of sixteen")
    assert len(strategy(server_host="0.0.0.0").execute(Tasks(1), Serve(), InMemoryLightningStore())) == 1


def test_settings_come_from_arguments_then_environment_then_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ClientServerExecutionStrategy()
    assert (plain.role, plain.server_host, plain.server_port, plain.managed_store) == ("both", "127.0.0.1", 4747, True)
    monkeypatch.setenv("AGL_CURRENT_ROLE", "runner")
    monkeypatch.setenv("AGL_SERVER_HOST", "10.0.0.4")
    monkeypatch.setenv("AGL_SERVER_PORT", "10000")
    monkeypatch.setenv("AGL_MANAGED_STORE", "0")
    read = ClientServerExecutionStrategy()
    assert (read.role, read.server_host, read.server_port, read.managed_store) == ("runner", "10.0.0.4", 10000, False)
    own = ClientServerExecutionStrategy(role="both", server_host="127.0.0.1", server_port=1, managed_store=True)
    assert (own.role, own.server_host, own.server_port, own.managed_store) == ("both", "127.0.0.1", 1, True)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"role": "Runner"}, r"role .* must be one of 'algorithm', 'runner', 'both'; got 'Runner'"),
    ({"main_process": "store"}, "main_process must be"),
    ({"main_process": "runner", "n_runners": 2}, "requires n_runners to be 1"),
    ({"main_process": "runner", "role": "algorithm"}, "only supported when role='both'"),
    ({"server_port": 70000}, "server_port must be at most 65535"),
    ({"server_port": 0, "role": "runner"}, "server_port=0 requires role='both'"),
    ({"n_runners": -1}, "n_runners must be at least 1; got -1"),
    ({"graceful_timeout": float("nan")}, "graceful_timeout must be a finite number"),
    ({"max_runner_restarts": -1}, "max_runner_restarts must be at least 0"),
    ({"start_method": "thread"}, "start_method must be one of 'fork', 'spawn', 'forkserver'"),
]


@pytest.mark.parametrize(("settings", "text"), WRONG)
def test_a_wrong_setting_is_refused_by_name(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ClientServerExecutionStrategy(**settings)


@pytest.mark.parametrize(("settings", "text"), WRONG[:3])
def test_a_wrong_setting_that_is_set_later_is_refused_by_name(settings: dict[str, Any], text: str) -> None:
    built = strategy()
    for name, value in settings.items():
        setattr(built, name, value)
    with pytest.raises(ValueError, match=text):
        built.execute(Tasks(), Serve(), InMemoryLightningStore())


def test_what_cannot_be_spawned_is_named_with_the_ways_out() -> None:
    async def local_runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None: ...

    with pytest.raises(TypeError, match=r"runner \(function\) cannot be pickled .* start_method='fork'"):
        strategy(start_method="spawn").execute(Tasks(), local_runner, InMemoryLightningStore())


async def test_roles_in_separate_processes_share_nothing_but_the_port(port: int) -> None:
    """The algorithm in a thread of this process, two runners in children of their own, as on two machines."""
    algorithm_side = strategy(role="algorithm", server_port=port)
    runner_side = strategy(role="runner", server_port=port, n_runners=2)

    runners = asyncio.create_task(
        asyncio.to_thread(runner_side.execute, patient_algorithm, Serve(cap=2), InMemoryLightningStore())
    )
    pids = await asyncio.to_thread(algorithm_side.execute, Tasks(4), broken_runner, InMemoryLightningStore())
    await runners
    assert len(set(pids)) == 2


def test_a_retried_rollout_keeps_its_place_when_the_runner_restarts(tmp_path: Path) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    assert len(strategy().execute(Tasks(2, config), DieOnce(mark=tmp_path / "killed"), InMemoryLightningStore())) == 2


class FreshStore(InMemoryLightningStore):
    """A memory store that may be handed to a spawned algorithm before it holds anything."""

    def __reduce__(self) -> Any:
        return (FreshStore, ())


def test_a_server_on_all_addresses_is_known_by_the_variable_and_is_that_of_another_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AGL_SERVER_HOST", "192.0.2.1")  # TEST-NET-1: nobody's
    monkeypatch.setenv("AGL_TOKEN", "a-token-of-this-test-and-of-no-other")
    made = agl.Trainer(
        algorithm="baseline",
        initial_resources={},
        strategy={"type": "cs", "server_host": "0.0.0.0", "server_port": free_port()},
        runner={"store_unreachable_timeout": 0.2},
    )
    with caplog.at_level("WARNING", "agentlightning"), pytest.raises(StoreUnreachableError, match=r"192\.0\.2\.1"):
        made.fit(lambda task: 1.0, train_dataset=[1])
    assert "192.0.2.1 is not an address of this machine: this process joins the run at http://192.0.2.1" in caplog.text


def test_the_role_both_on_loopback_joins_nobody() -> None:
    assert not ClientServerExecutionStrategy(role="both").may_be_joined
    assert not ClientServerExecutionStrategy(role="algorithm", server_host="10.0.0.1").may_be_joined
    assert not ClientServerExecutionStrategy(role="both", server_host="10.0.0.1", managed_store=False).may_be_joined
