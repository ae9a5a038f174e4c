"""A model server that answers at once with the same reply, in a separate process; and the request to it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from bench.store_children import Part

TOKENS = list(range(2000, 2064))
_LOGPROBS = [{"token": "t", "logprob": -0.5, "bytes": [116], "top_logprobs": []} for _ in TOKENS]
_CHOICE = {
    "index": 0,
    "finish_reason": "stop",
    "message": {"role": "assistant", "content": "The answer is 42."},
    "token_ids": TOKENS,
    "logprobs": {"content": _LOGPROBS},
}
_REPLY: dict[str, Any] = {
    "object": "chat.completion",
    "created": 1_700_000_000,
    "model": "policy",
    "choices": [_CHOICE],
    "prompt_token_ids": list(range(1000, 1200)),
    "usage": {"prompt_tokens": 200, "completion_tokens": 64, "total_tokens": 264},
}
_QUESTION = "What is six times seven? " * 20
REQUEST: dict[str, Any] = {
    "model": "policy",
    "temperature": 0.7,
    "max_tokens": 64,
    "messages": [{"role": "system", "content": "You are terse."}, {"role": "user", "content": _QUESTION}],
}
"""200 prompt tokens and 64 completion tokens with their log-probabilities, as an agent's call often is."""
FRAMES = 18
"""Frames of a stream: the words, the finish reason and the last word."""
HELD = "held"
"""A stream with this user waits after three frames until `release`."""


def _chunk(choice: dict[str, Any], **fields: Any) -> bytes:
    chunk = {"object": "chat.completion.chunk", "created": 1, "model": "policy", **fields}
    return b'data: {"id": "chatcmpl-%d", ' + json.dumps({**chunk, "choices": [choice]})[1:].encode() + b"\n\n"


def _frames() -> list[bytes]:
    words = [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": f"word{index} "},
            "token_ids": TOKENS[index * 4 : index * 4 + 4],
            "logprobs": {"content": _LOGPROBS[index * 4 : index * 4 + 4]},
            "finish_reason": None,
        }
        for index in range(16)
    ]
    frames = [_chunk(words[0], prompt_token_ids=_REPLY["prompt_token_ids"]), *map(_chunk, words[1:])]
    return [*frames, _chunk({"index": 0, "delta": {}, "finish_reason": "stop"}), b"data: [DONE]\n\n"]


_WHOLE = b'{"id": "chatcmpl-%d", ' + json.dumps(_REPLY)[1:].encode()
_STREAM = _frames()


class _Session(asyncio.Protocol):
    """One connection, kept alive; requests must have a Content-Length."""

    answered = 0
    held: set[_Session]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
            if len(self._buffer) < end + 4 + length:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + length], self._buffer[end + 4 + length :]
            self._answer(body)

    def _answer(self, body: bytes) -> None:
        _Session.answered += 1
        if b'"stream": true' not in body:
            self._send(b"application/json", _WHOLE % _Session.answered)
            return
        frames = [frame % _Session.answered if b"%d" in frame else frame for frame in _STREAM]
        if HELD.encode() not in body:
            self._send(b"text/event-stream", b"".join(frames))
            return
        size = sum(map(len, frames))
        self._head(b"text/event-stream", size)
        self._transport.write(b"".join(frames[:3]))
        self._rest = b"".join(frames[3:])
        _Session.held.add(self)

    def go_on(self) -> None:
        self._transport.write(self._rest)

    def _send(self, kind: bytes, body: bytes) -> None:
        self._head(kind, len(body))
        self._transport.write(body)

    def _head(self, kind: bytes, length: int) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (kind, length))


class Engine(Part):
    """The model server."""

    async def open(self) -> int:
        """Return the port."""
        _Session.held = set()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(_Session, "127.0.0.1", 0, backlog=1024)
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()

    async def release(self) -> None:
        """Let the held streams continue to their end."""
        for session in _Session.held:
            session.go_on()
        _Session.held.clear()
