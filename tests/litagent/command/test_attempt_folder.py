"""The folder of an attempt, and the reward file in it, with a program that replaces them."""

from __future__ import annotations

import os
import socket
import tempfile
import textwrap
import tracemalloc
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.litagent.command.attempt_folder import AttemptFolder, UnusableFile
from agentlightning.store.memory import InMemoryLightningStore
from tests.litagent.test_command import reward_of, run_task
from tests.stubs.processes import run_program
from tests.stubs.unprivileged import folder_of_unprivileged, unprivileged


@pytest.fixture(autouse=True)
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the parent of the folders of attempts; it must be empty afterwards."""
    folder = tmp_path / "attempts"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def bash(script: str, **settings: object) -> agl.CommandAgent:
    return agl.CommandAgent(["bash", "-c", textwrap.dedent(script)], reward="file", **settings)  # pyright: ignore[reportArgumentType] -- settings of a test


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("mkfifo $AGL_REWARD_FILE", "is a pipe; expected a regular file"),
        ("mkdir $AGL_REWARD_FILE", "is a folder; expected a regular file"),
        ("ln -s /dev/zero $AGL_REWARD_FILE", "is a link; expected a regular file"),
        ("ln -s $AGL_REWARD_FILE $AGL_REWARD_FILE", "is a link; expected a regular file"),
        ("echo 1 > $TMPDIR/x; ln -s x $AGL_REWARD_FILE", "is a link; expected a regular file"),
        ("echo 1 > $TMPDIR/x; ln $TMPDIR/x $AGL_REWARD_FILE", "has 2 names"),
        ("truncate -s 400M $AGL_REWARD_FILE", "holds 419430400 bytes, which is more than 65536"),
        ("truncate -s 8T $AGL_REWARD_FILE || truncate -s 1T $AGL_REWARD_FILE", "which is more than 65536"),
        ("(printf 1; head -c 65536 /dev/zero | tr '\\0' ' ') > $AGL_REWARD_FILE", "holds 65537 bytes"),
        ("printf '\"\\xff\"' > $AGL_REWARD_FILE", "is not valid JSON"),
        ("head -c 65536 /dev/zero | tr '\\0' '[' > $AGL_REWARD_FILE", "is not valid JSON: it is nested too deeply"),
        (
            "printf '{\"reward\": 1' > $AGL_REWARD_FILE; head -c 9000 /dev/zero | tr '\\0' 1 >> $AGL_REWARD_FILE",
            "is not valid JSON",
        ),
        (":", "did not write the file"),
    ],
)
async def test_what_is_no_small_regular_file_says_no_reward(
    store: InMemoryLightningStore, attempts: Path, script: str, text: str
) -> None:
    tracemalloc.start()
    attempt = await run_task(store, bash(script))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert attempt.error is not None
    assert (attempt.outcome, attempt.outcome_reason) == ("infrastructure_fault", "invalid_result")
    assert text in attempt.error.message
    assert peak < 20 * 2**20
    assert os.listdir(attempts) == []


async def test_a_reward_as_long_as_is_allowed_counts(store: InMemoryLightningStore) -> None:
    script = "(printf 0.5; head -c 65533 /dev/zero | tr '\\0' ' ') > $AGL_REWARD_FILE"
    assert await reward_of(store, await run_task(store, bash(script))) == 0.5


@pytest.mark.parametrize("filler", ["[", "9", " "])
async def test_a_huge_last_line_is_not_looked_at(store: InMemoryLightningStore, filler: str) -> None:
    script = f"echo 0.25; head -c 2000000 /dev/zero | tr '\\0' '{filler}'"
    agent = agl.CommandAgent(["bash", "-c", script], max_output_bytes=4 * 2**20)
    assert await reward_of(store, await run_task(store, agent)) == 0.25


async def test_a_folder_that_was_moved_away_is_read_and_removed_and_what_stands_in_its_place_is_not_followed(
    store: InMemoryLightningStore, attempts: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "reward.json").write_text("1.0")
    script = f"echo 0.5 > $AGL_REWARD_FILE; mv $TMPDIR {attempts}/moved; ln -s {victim} $TMPDIR"
    attempt = await run_task(store, bash(script))
    assert await reward_of(store, attempt) == 0.5
    assert (victim / "reward.json").read_text() == "1.0"
    assert os.listdir(attempts) == []


@pytest.mark.parametrize(
    "script",
    [
        "python3 -c \"import os; [(os.mkdir('d'), os.chdir('d')) for _ in range(3000)]\"",
        "mkdir -p a/b/c; touch a/b/c/.agl-0 .agl-0; mkdir .agl-1 a/.agl-2; chmod 000 a/b .agl-1",
        "ln -s / root; mkdir a; ln -s ../../victim a/link; mkfifo a/pipe",
        "seq 12000 | xargs touch; mkdir a; cd a; seq 12000 | xargs touch",
        "rm -rf $TMPDIR",
        "rm -rf $TMPDIR; mkdir -p $TMPDIR/a/b; touch $TMPDIR/a/b/c",
        "rm -rf $TMPDIR; touch $TMPDIR",
    ],
)
async def test_nothing_is_left_of_a_folder_and_nothing_else_is_touched(
    store: InMemoryLightningStore, attempts: Path, tmp_path: Path, script: str, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    agent = agl.CommandAgent(["bash", "-c", f"cd $TMPDIR; {script}; echo 1.0"])
    assert await reward_of(store, await run_task(store, agent)) == 1.0
    assert os.listdir(attempts) == []
    assert (victim / "kept").read_text() == "kept"
    assert "Could not remove the folder" not in caplog.text


def test_files_are_closed_to_others_whatever_the_umask() -> None:
    before = os.umask(0)
    folder = AttemptFolder()
    folder.write("task.json", b"{}")
    os.umask(before)
    assert [oct(path.stat().st_mode & 0o777) for path in (folder.path, folder.path / "task.json")] == ["0o700", "0o600"]
    folder.remove()


def test_a_socket_and_a_file_of_another_user_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = AttemptFolder()
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(folder.path)
        listening.bind("socket")  # the whole path may be longer than a socket's name can be
        with pytest.raises(UnusableFile, match="expected a regular file"):
            folder.read("socket", 10)
    monkeypatch.undo()
    if os.geteuid() == 0:
        folder.write("foreign", b"1.0")
        os.chown(folder.path / "foreign", 65534, 65534)
        with pytest.raises(UnusableFile, match="belongs to the user 65534"):
            folder.read("foreign", 10)
    folder.remove()
    assert not folder.path.exists()


PROGRAM = """
import asyncio, logging, sys
import agentlightning as agl
from agentlightning.runner import LitAgentRunner
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer

async def main(script):
    store = InMemoryLightningStore()
    made = await store.enqueue_rollout(input={})
    runner = LitAgentRunner(OtelTracer(), max_rollouts=1)
    with runner.run_context(agent=agl.CommandAgent(["bash", "-c", script], reward="file"), store=store):
        await runner.iter()
    [attempt] = await store.query_attempts(made.rollout_id)
    print(attempt.outcome, agl.find_final_reward(list(await store.query_spans(attempt.rollout_id))))
    await store.close()

logging.basicConfig()
for script in sys.argv[1:]:
    asyncio.run(main(script))
"""


CLOSING = {
    "chmod 0 $TMPDIR": "infrastructure_fault None",  # it closed its own reward file, too
    "mkdir -p a/b/c; touch a/b/c/d; chmod 0 a/b/c a/b a $TMPDIR": "infrastructure_fault None",
    "mkdir a; touch a/b; chmod 500 a $TMPDIR": "scored 1.0",
    "mv $TMPDIR $TMPDIR.moved; chmod 0 $TMPDIR.moved": "infrastructure_fault None",
    "mv $TMPDIR $TMPDIR.moved; mkdir -p $TMPDIR/a/b; chmod 0 $TMPDIR/a $TMPDIR": "scored 1.0",
}


def test_a_folder_that_its_program_has_closed_is_removed_by_a_runner_that_is_not_root() -> None:
    user = unprivileged()
    with folder_of_unprivileged() as attempts:
        scripts = [f"cd $TMPDIR; echo 1.0 > $AGL_REWARD_FILE; {script}" for script in CLOSING]
        own = {"PYTHONPATH": user.path, "TMPDIR": str(attempts), "PATH": os.environ["PATH"]}
        done = run_program(user.python, "-c", PROGRAM, *scripts, folder=Path("/"), environment=own, popen=user.popen)
        files = os.listdir(attempts)
    assert done.stdout.splitlines() == list(CLOSING.values()), done.stderr
    assert files == []
    assert "Could not remove the folder" not in done.stderr
