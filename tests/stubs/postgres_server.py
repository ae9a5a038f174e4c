"""A real PostgreSQL server of one's own: made in a temporary folder, on a unix socket, gone when the tests end.

    with PostgresServer() as server:
        store = PostgresLightningStore(server.uri)

The server refuses to run as root, so root starts it as the user `postgres` (Debian makes it) or `nobody`. It dies with
the process that started it, however that ends. `fsync` is on: what it acknowledges is on disk. Autovacuum is off:
nothing runs beside the test. `AGL_TEST_POSTGRES_URI` names a running server to be used instead.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

_SETTINGS = (
    "listen_addresses=",
    "unix_socket_permissions=0777",
    "max_connections=200",
    "autovacuum=off",
    "log_checkpoints=off",
)
_FAST, _AT_ONCE = "INT", "QUIT"
"""The signal that tells PostgreSQL to stop: disconnecting everybody, or as in a crash."""
_GUARD = """
"$@" </dev/null >>server.log 2>&1 &
read -r how
kill -"${how:-QUIT}" $!
wait $!
if [ -z "$how" ]; then cd / && rm -rf "$OLDPWD"; fi
"""
"""Starts the server and stops it by the signal that it is told; when nobody is there any more to tell it, cleans up."""


def find_binaries() -> Path | None:
    """Return the folder of the newest installed server's programs; None if there is no server."""
    files = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    pg_config = shutil.which("pg_config")
    if pg_config is not None:
        answer = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        files.append(Path(answer.stdout.strip() or "."))
    return next((folder for folder in files if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


class PostgresServer:
    """One server. May be stopped and started again with the same data, from any thread, one call at a time."""

    def __init__(self) -> None:
        binaries = find_binaries()
        if binaries is None:
            pytest.skip("no PostgreSQL server is installed (apt-get install postgresql), no AGL_TEST_POSTGRES_URI")
        self._binaries = binaries
        self._user = _unprivileged_user()
        self._folder = Path(tempfile.mkdtemp(prefix="agl-postgres-"))
        self._guard: subprocess.Popen[bytes] | None = None
        self.uri = f"postgresql://agl@/postgres?host={self._folder}"

    def __enter__(self) -> Self:
        try:
            if self._user is not None:
                shutil.chown(self._folder, self._user)
            data = str(self._folder / "data")
            self._run("initdb", "-D", data, "-U", "agl", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the server and wait until it takes connections (recovery from a crash included)."""
        settings = [f"-c{setting}" for setting in (*_SETTINGS, f"unix_socket_directories={self._folder}")]
        server = [str(self._binaries / "postgres"), "-D", str(self._folder / "data"), *settings]
        command = self._as_user("sh", "-c", _GUARD, "guard", *server)
        self._guard = subprocess.Popen(command, cwd=self._folder, stdin=subprocess.PIPE, start_new_session=True)
        ready = [str(self._binaries / "pg_isready"), "-q", "-h", str(self._folder)]
        end = time.monotonic() + 60
        while subprocess.run(ready, check=False).returncode != 0:
            if time.monotonic() > end:
                raise RuntimeError(f"PostgreSQL did not start: {(self._folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.02)  # the server says "ready" to nobody but those who ask

    def stop(self) -> None:
        """Stop the server in an orderly way; connections are cut."""
        self._end(_FAST)

    def crash(self) -> None:
        """Stop the server as if the machine had died: no checkpoint, recovery at the next start."""
        self._end(_AT_ONCE)

    def close(self) -> None:
        """Stop the server and remove its folder. May be called twice."""
        self._end(_AT_ONCE)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self, how: str) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.communicate(how.encode() + b"\n", timeout=60)

    def _run(self, program: str, *arguments: str) -> None:
        command = self._as_user(str(self._binaries / program), *arguments)
        done = subprocess.run(command, cwd=self._folder, capture_output=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed: {done.stderr.decode(errors='replace')}")

    def _as_user(self, *command: str) -> list[str]:
        """Return the command such that an unprivileged user runs it."""
        if self._user is None:
            return [*command]
        group = pwd.getpwnam(self._user).pw_gid
        return ["setpriv", f"--reuid={self._user}", f"--regid={group}", "--clear-groups", *command]


def _unprivileged_user() -> str | None:
    """Return the user as whom root starts the server; None if we are not root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A server of the session's own, which a test may stop if it starts it again."""
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install 'agl-framework[postgres]')")
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_uri(request: pytest.FixtureRequest) -> str:
    """The URI of a database; each test takes a partition of its own in it."""
    named = os.environ.get("AGL_TEST_POSTGRES_URI")
    if named:
        pytest.importorskip("psycopg", reason="psycopg is not installed (pip install 'agl-framework[postgres]')")
        return named
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.uri
