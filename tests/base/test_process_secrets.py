"""Secrets in a process: the source of each, what remains of it, and the processes that get it."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentlightning.base import process_secrets
from agentlightning.base.process_secrets import Handed, hold, secret, server_token
from agentlightning.types.attempt_key import _signing_key, attempt_key, judge_key
from tests.stubs.processes import run_program
from tests.stubs.unprivileged import unprivileged

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc and prctl")


def told(code: str, environment: dict[str, str], arguments: tuple[str, ...] = (), **popen: Any) -> Any:
    """Run code in a process of its own and return what it prints as JSON."""
    program = "import json, os\nfrom agentlightning.base import process_secrets\n" + code
    whole = {"PATH": os.environ["PATH"], **environment}
    return json.loads(run_program("python", "-c", program, *arguments, environment=whole, popen=popen).stdout)


def test_a_secret_leaves_the_environment_and_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", " first \n")
    assert server_token() == "first"
    assert "AGL_TOKEN" not in os.environ
    assert subprocess.run(["env"], capture_output=True, text=True, check=True).stdout.count("AGL_TOKEN") == 0
    assert server_token() == "first"
    monkeypatch.setenv("AGL_TOKEN", "second")
    assert server_token() == "second"
    monkeypatch.setenv("AGL_TOKEN", "")
    assert server_token() is None
    hold("AGL_TOKEN", "third")
    assert server_token() == "third"
    process_secrets.forget()
    assert server_token() is None


@LINUX
def test_nothing_of_it_is_left_where_the_kernel_shows_the_environment() -> None:
    code = """
shown = open("/proc/self/environ", "rb", buffering=0)  # only root may open it once the process is not dumpable
before = shown.read()
process_secrets.server_token()
shown.seek(0)
after = shown.read()
print(json.dumps([before.count(b"planted"), after.count(b"planted"), len(before) == len(after), b"KEPT=yes" in after]))
"""
    assert told(code, {"AGL_TOKEN": "planted", "KEPT": "yes", "AGL_TOKEN_OF_ANOTHER": "plant"}) == [1, 0, True, True]


@LINUX
def test_a_process_without_secrets_can_be_traced_and_dumped_and_one_with_them_cannot() -> None:
    code = """
import ctypes
dumpable = lambda: ctypes.CDLL(None).prctl(3)
before = dumpable()
process_secrets.server_token()
print(json.dumps([before, dumpable()]))
"""
    assert told(code, {}) == [1, 1]
    assert told(code, {"AGL_TOKEN": ""}) == [1, 1]
    assert told(code, {"AGL_TOKEN": "planted"}) == [1, 0]


@LINUX
def test_a_process_that_is_not_dumpable_still_takes_its_heartbeats_figures() -> None:
    user = unprivileged()
    code = """
import os
from agentlightning.base import process_secrets
from agentlightning.utils.system_snapshot import memory_capacity_bytes, system_snapshot
process_secrets.hold("AGL_TOKEN", "planted")
import psutil
assert os.geteuid() != 0 and os.stat("/proc/self/environ").st_uid == 0, "not protected"
assert os.listdir("/proc/self/fd") and psutil.Process().memory_info().rss and psutil.Process().children() == []
print(system_snapshot(include_gpu=True)["mem_total_gb"] > 0 and memory_capacity_bytes() > 0)
"""
    own = {"PYTHONPATH": user.path}
    done = run_program(user.python, "-c", code, folder=Path("/"), environment=own, popen=user.popen)
    assert done.stdout == "True\n"


# --- files and pipes -------------------------------------------------------------------------------------------------


def token_file(folder: Path, content: bytes = b"of the file\n", mode: int = 0o600) -> Path:
    file = folder / "token"
    file.write_bytes(content)
    file.chmod(mode)
    return file


def test_a_token_may_come_from_a_file_of_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN_FILE", str(token_file(tmp_path)))
    assert server_token() == "of the file"
    assert "AGL_TOKEN_FILE" not in os.environ
    assert server_token() == "of the file"


def test_a_token_may_come_through_a_pipe_and_was_never_on_disk_or_in_an_environment() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"of the pipe")
    os.close(writer)
    code = "print(json.dumps(process_secrets.server_token()))"
    assert told(code, {"AGL_TOKEN_FILE": f"/dev/fd/{reader}"}, pass_fds=(reader,)) == "of the pipe"
    os.close(reader)


@pytest.mark.parametrize(
    ("content", "mode", "text"),
    [
        (b"token", 0o644, r"mode 0644.*chmod 600"),
        (b"token", 0o640, r"mode 0640.*chmod 600"),
        (b" \n", 0o600, "is empty"),
        (b"t" * 5000, 0o600, "more than 4096 bytes"),
        (b"\xff\xfe", 0o600, "cannot be read"),
    ],
)
def test_a_file_that_will_not_do_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, mode: int, text: str
) -> None:
    monkeypatch.setenv("AGL_TOKEN_FILE", str(token_file(tmp_path, content, mode)))
    with pytest.raises(ValueError, match=text) as refused:
        server_token()
    assert "AGL_TOKEN_FILE=" in str(refused.value)


@pytest.mark.parametrize("place", ["/nowhere/token", "/", "/dev/zero"])
def test_what_is_no_file_is_refused(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("AGL_TOKEN_FILE", place)
    with pytest.raises(ValueError, match=r"No such file|is neither a regular file nor a pipe"):
        server_token()


@pytest.mark.heavy
def test_a_pipe_without_a_writer_and_one_that_stays_open_end_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setenv("AGL_TOKEN_FILE", str(fifo))
    with pytest.raises(ValueError, match="is empty"):
        server_token()
    monkeypatch.setattr(process_secrets, "_WAIT_SECONDS", 0.05)
    held = os.open(fifo, os.O_RDWR)
    with pytest.raises(ValueError, match="the writer did not close it"):
        server_token()
    os.close(held)


def test_both_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN_FILE", str(token_file(tmp_path)))
    monkeypatch.setenv("AGL_TOKEN", "another")
    with pytest.raises(ValueError, match="AGL_TOKEN and AGL_TOKEN_FILE are both set"):
        server_token()


# --- who is handed them ----------------------------------------------------------------------------------------------


def _tell(handed: Handed, results: Any) -> None:
    results.put((secret("AGL_TOKEN"), secret("PROVIDER_KEY"), "AGL_TOKEN" in os.environ))


def test_a_spawned_child_is_handed_what_its_environment_does_not_hold() -> None:
    hold("AGL_TOKEN", "token")
    hold("PROVIDER_KEY", "key")
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    child = context.Process(target=_tell, args=(Handed(), results))
    child.start()
    assert results.get() == ("token", "key", False)
    child.join()


def test_many_threads_that_ask_at_once_all_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        token = f"token-{number}"
        monkeypatch.setenv("AGL_TOKEN", token)
        with ThreadPoolExecutor(4) as threads:
            got = [future.result() for future in [threads.submit(server_token) for _ in range(4)]]
        assert got == [token] * 4


# --- keys made from the token ----------------------------------------------------------------------------------------


def test_the_key_of_an_attempt_costs_one_stretching_in_a_process() -> None:
    _signing_key.cache_clear()
    for number in range(20):
        key = attempt_key("ro-1", f"at-{number}", "a token")
        assert judge_key(key, "ro-1", f"at-{number}", "a token") == "ok"
        assert judge_key(key, "ro-1", f"at-{number}", "b token") == "forged"
    assert _signing_key.cache_info().misses == 2


def test_keys_are_the_same_whatever_white_space_surrounds_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", "a token\n")
    assert judge_key(attempt_key("ro-1", "at-1"), "ro-1", "at-1", server_token()) == "ok"


def test_a_secret_that_nobody_needs_here_is_discarded_and_the_process_stays_open() -> None:
    code = """
process_secrets.discard("AGL_TOKEN")
print(json.dumps(["AGL_TOKEN" in os.environ, process_secrets.server_token()]))
"""
    assert told(code, {"AGL_TOKEN": "planted"}) == [False, None]


@LINUX
def test_the_password_of_a_database_leaves_the_command_line() -> None:
    code = """
import sys, ctypes
from agentlightning.store.spec import store_from_spec
shown = lambda: open("/proc/self/cmdline", "rb").read()
before = shown()
try:
    store_from_spec(sys.argv[1])
except Exception:
    pass  # no such database
after = shown()
print(json.dumps([b"pass@word" in before, b"pass@word" in after, b"//user:*********@host" in after,
                  "pass@word" in sys.argv[1], ctypes.CDLL(None).prctl(3)]))
"""
    for scheme in ("postgresql", "mongodb"):
        assert told(code, {}, arguments=(f"{scheme}://user:pass@word@host:1/db",)) == [True, False, True, True, 0]


@LINUX
def test_the_command_is_protected_before_what_takes_long_to_import() -> None:
    code = """
import ctypes, sys

class Look:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            print(json.dumps(ctypes.CDLL(None).prctl(3)))

sys.meta_path.insert(0, Look())
import agentlightning.cli
"""
    assert told(code, {"AGL_TOKEN": "planted"}) == 0
    assert told(code, {}) == 1
