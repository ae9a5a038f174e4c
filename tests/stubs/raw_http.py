"""A socket that speaks HTTP as badly as a test wants: bytes out, and what comes back taken apart."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def request(method: str, path: str | bytes, body: bytes = b"", *, host: str = "127.0.0.1", **headers: str) -> bytes:
    """Return the bytes of a request; a header whose value is empty is left out, `_` in names is `-`."""
    fields = {"host": host, "content-length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}
    lines = [f"{name}: {value}".encode("latin-1") for name, value in fields.items() if value]
    raw = path if isinstance(path, bytes) else path.encode()
    return b"\r\n".join([method.encode() + b" " + raw + b" HTTP/1.1", *lines, b"", body])


async def read_answer(reader: asyncio.StreamReader, *, to_head: bool = False) -> Answer:
    """Return the next answer of a connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    length = 0 if to_head else int(headers.get("content-length", "0"))
    return Answer(int(lines[0].split(" ")[1]), headers, await reader.readexactly(length))


async def exchange(port: int, *pieces: bytes, seconds: float = 20.0, to_head: bool = False) -> Answer:
    """Send bytes over a connection of their own and return the answer to them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
        return await asyncio.wait_for(read_answer(reader, to_head=to_head), seconds)
    finally:
        writer.close()
