"""One run of a program: a keeper starts it, its output is read up to a limit, and it is always ended."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import IO, Any

from typing_extensions import override

from agentlightning.base.field_help import explain_fields
from agentlightning.errors import AgentLightningError
from agentlightning.litagent.command.keeper import KeptProgram, start_kept
from agentlightning.litagent.command.sandbox import Sandbox, forwarding
from agentlightning.litagent.litagent import AgentFault

DRAIN_SECONDS = 0.5
"""Seconds to read output after the program's end, because its descendants may still hold its pipes."""
CANCEL_SECONDS = 0.3
"""Seconds that the program may take to end when the attempt is cancelled; less than a runner waits."""
HIDDEN = "[key]"


class ProgramFailed(AgentLightningError, RuntimeError):
    """The program could not be started, or ended with an exit code that counts as failure."""


class ProgramTimedOut(AgentFault, TimeoutError):
    """The program exceeded the time limit of its `CommandAgent`."""

    reason = "timeout"


class ProgramResultError(AgentFault, ValueError):
    """The program succeeded and did not report its reward in the configured form."""

    reason = "invalid_result"


@explain_fields
@dataclass(frozen=True, slots=True)
class ProgramOutput:
    """The output of a program. Only the last bytes of each stream are kept, up to the agent's limit."""

    exit_code: int
    """The exit code; the negative signal number if a signal ended it."""
    stdout: str
    """The end of its standard output."""
    stderr: str
    """The end of its standard error."""
    seconds: float
    """Seconds from its start to its end."""
    dropped_bytes: int = 0
    """Number of bytes of both streams that were dropped."""


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Limits of one run of a program."""

    timeout_seconds: float | None
    stop_seconds: float
    """Seconds between SIGTERM and SIGKILL, when the time is up."""
    output_bytes: int
    """Maximum number of bytes to keep of each stream."""


class Pipe(asyncio.Protocol):
    """Our end of a stream; `ended` is done when either side has closed it."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._transport: asyncio.BaseTransport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    def close(self) -> None:
        """Close the stream and drop pending data."""
        if self._transport is None or self.ended.is_set():
            return
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()
        else:
            self._transport.close()


class Tail(Pipe):
    """The last bytes of a stream, and the number of dropped ones."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._kept = bytearray()
        self.dropped = 0

    @override
    def data_received(self, data: bytes) -> None:
        self._kept += data
        surplus = len(self._kept) - self._most
        if surplus > 0:
            del self._kept[:surplus]
            self.dropped += surplus

    def text(self) -> str:
        """Return the kept bytes as text; a cut or invalid character is replaced."""
        return self._kept.decode("utf-8", "replace")


class Program:
    """One run of a program. Call `run` once; `output` may be called at any time, also after a failure."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str | None,
        limits: ProgramLimits,
        secrets: Sequence[str] = (),
        user: tuple[int, int] | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        self._command = list(command)
        self._env = dict(env)
        self._cwd = cwd
        self._limits = limits
        self._secrets = secrets
        self._user = user
        self._sandbox = sandbox
        self._stdin = Pipe()
        self._stdout, self._stderr = Tail(limits.output_bytes), Tail(limits.output_bytes)
        self._began = time.monotonic()
        self._seconds = 0.0
        self._exit_code: int | None = None

    def output(self) -> ProgramOutput | None:
        """Return the program's output; None while it runs, or if it was never started."""
        if self._exit_code is None:
            return None
        stdout, stderr = self._text_of(self._stdout), self._text_of(self._stderr)
        dropped = self._stdout.dropped + self._stderr.dropped
        return ProgramOutput(self._exit_code, stdout, stderr, self._seconds, dropped)

    def _text_of(self, stream: Tail) -> str:
        """Return the kept part of a stream, without the keys that the program got."""
        text = stream.text()
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

    async def run(self, stdin: bytes | None) -> ProgramOutput:
        """Start the program, write `stdin` and close it, and wait for its end. Cancelling kills the process group.

        Raises:
            ProgramFailed: the program cannot be started.
            ProgramTimedOut: the program exceeded its time limit; its process group has been ended.
        """
        self._check()
        with ExitStack() as stack:
            command, sandbox = self._command, None
            if self._sandbox is not None:
                try:
                    command = self._sandbox.command(command, self._env)
                    sandbox = stack.enter_context(self._sandbox.limits())
                except (RuntimeError, ValueError) as error:
                    raise ProgramFailed(f"The program {self._command[0]!r} cannot be started: {error}") from error
            await self._run(stdin, command, sandbox)
        output = self.output()
        assert output is not None
        return output

    async def _run(self, stdin: bytes | None, command: Sequence[str], sandbox: Mapping[str, Any] | None) -> None:
        cwd = "/" if sandbox is not None else self._cwd or os.getcwd()
        ours, theirs = _pipes(stdin is not None)
        try:
            program = await start_kept(command, self._env, cwd, theirs, self._user, sandbox)
        except OSError as error:
            self._close(ours)
            text = f"The program {self._command[0]!r} cannot be started: {error.strerror or error}"
            raise ProgramFailed(text) from error
        grace = CANCEL_SECONDS
        network = AsyncExitStack()
        try:
            await self._connect(ours, stdin or b"")
            if self._sandbox is not None:
                await network.enter_async_context(forwarding(program.listeners, self._sandbox.addresses))
            in_time = await _within(self._limits.timeout_seconds, program.exited)
            grace = self._limits.stop_seconds
            if not in_time:
                raise ProgramTimedOut(
                    f"{self._command[0]} exceeded timeout_seconds={self._limits.timeout_seconds:g} and was ended"
                )
        finally:
            try:
                await _end(program, grace)
                await _within(DRAIN_SECONDS, self._streams_end())
            finally:
                try:
                    await network.aclose()
                finally:
                    await program.close()
            self._exit_code = program.exited.result()
            await _within(DRAIN_SECONDS, self._streams_end())  # give up a pipe that another process holds
            self._close(ours)
            self._seconds = round(time.monotonic() - self._began, 3)

    def _check(self) -> None:
        if self._cwd is not None and not os.path.isdir(self._cwd):
            raise ProgramFailed(f"cwd={self._cwd!r} is not a folder on this machine")
        name, path = self._command[0], self._env.get("PATH", os.defpath)
        place = os.path.join(self._cwd or os.curdir, name) if os.path.dirname(name) else name
        if shutil.which(place, path=path) is None:
            raise ProgramFailed(
                f"The program {name!r} cannot be started: no executable file with this name in PATH={path!r}. Use its "
                "full path, or install it on the machine of the runner."
            )

    async def _connect(self, pipes: Sequence[IO[bytes]], stdin: bytes) -> None:
        """Read both outputs and write the input, concurrently."""
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: self._stdout, pipes[0])
        await loop.connect_read_pipe(lambda: self._stderr, pipes[1])
        if len(pipes) > 2:
            writing, _ = await loop.connect_write_pipe(lambda: self._stdin, pipes[2])
            writing.write(stdin)
            writing.write_eof()  # closes when all is written; a program need not read its input

    async def _streams_end(self) -> None:
        await self._stdout.ended.wait()
        await self._stderr.ended.wait()

    def _close(self, pipes: Sequence[IO[bytes]]) -> None:
        for protocol in (self._stdin, self._stdout, self._stderr):
            protocol.close()
        for pipe in pipes:
            pipe.close()


def _pipes(with_input: bool) -> tuple[list[IO[bytes]], list[int]]:
    """Return our ends of output, error output and, perhaps, input; and the program's input, output and error output."""
    (out, their_out), (err, their_err) = os.pipe(), os.pipe()
    ours: list[IO[bytes]] = [os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0)]
    if not with_input:
        return ours, [os.open(os.devnull, os.O_RDONLY), their_out, their_err]
    their_in, write = os.pipe()
    return [*ours, os.fdopen(write, "wb", 0)], [their_in, their_out, their_err]


async def _within(seconds: float | None, awaited: Awaitable[object]) -> bool:
    """Wait at most `seconds` and return whether it is done. An unfinished coroutine is cancelled, a future is not."""
    waiting = asyncio.ensure_future(awaited)
    try:
        await asyncio.wait({waiting}, timeout=seconds)
        return waiting.done()
    finally:
        if waiting is not awaited:
            waiting.cancel()


async def _end(program: KeptProgram, grace: float) -> None:
    """Request the program to end, and kill it after the grace period; do nothing if it has ended."""
    if program.exited.done():
        return
    program.terminate()
    if not await _within(grace, program.exited):
        program.kill()
