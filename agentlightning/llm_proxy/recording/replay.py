"""Recorded model calls: written as they happen, replayed without a model server.

One JSON object per line: the route, the request to the server (without the gateway's additions), and the complete
reply with its tokens. A later run replays the file call by call.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Literal, get_args

from agentlightning.base.private_files import open_private, private_folder
from agentlightning.llm_proxy.dialects.json_values import Json, is_list, json_bytes
from agentlightning.llm_proxy.replies import CallFailed

Match = Literal["strict", "nearest"]
"""`strict`: the same request; `nearest`: the most similar one of the same route and model."""
_WITHOUT_EFFECT = ("stream", "stream_options", "user", "metadata", "store", "seed", "prompt_cache_key")
"""Fields that do not change the meaning of a request; requests that differ only in them are the same."""
_SHOWN = 300
_COMPARED = 4096


class CallFile:
    """Records calls to a file, replays them from a file, or both: then missing calls are made and added.

    Calls with the same request are replayed in the order in which they were recorded; the last one is repeated. May
    be used from any thread.

    Raises:
        ValueError: neither file is set, a file cannot be read (names the line), or the way to match is unknown.
    """

    def __init__(self, record: str | Path | None, replay: str | Path | None, match: Match = "strict") -> None:
        if match not in get_args(Match):
            raise ValueError(f"replay_match must be one of {', '.join(get_args(Match))}; got {match!r}")
        self._match: Match = match
        self._calls: dict[str, list[Json]] = {}
        self._requests: dict[str, Json] = {}
        self._replayed: dict[str, int] = {}
        self._lock, self._replaying = threading.Lock(), threading.Lock()
        self._path = None if record is None else Path(record)
        self._file: IO[str] | None = None
        self.replays, self.records = replay is not None, record is not None
        if replay is not None and not (Path(replay) == self._path and not Path(replay).exists()):
            self._read(Path(replay))

    def reply_to(self, route: str, request: Json) -> Json | None:
        """Return the recorded reply; None if the model server is to be called.

        Raises:
            CallFailed: 404, there is none and no server may be called; shows the most similar request.
        """
        if not self.replays:
            return None
        with self._replaying:
            key = _key(route, request)
            if key not in self._calls and self._match == "nearest":
                key = self._nearest(route, request) or key
            replies = self._calls.get(key)
            if replies is not None:
                number = self._replayed.get(key, 0)
                self._replayed[key] = number + 1
                return replies[min(number, len(replies) - 1)]
            if self._path is not None:
                return None
            near = self._nearest(route, request)
        excerpt = f" Most similar: {_text(self._requests[near])[-_SHOWN:]!r}" if near else ""
        text = f"The file of replay= does not contain this call: {_text(request)[-_SHOWN:]!r}.{excerpt}"
        raise CallFailed(404, text, code="replay_miss", state="upstream_error")

    def record(self, route: str, request: Json, reply: Json) -> None:
        """Record a call with its reply, if calls are recorded."""
        if self._path is None:
            return
        call = {"route": route, "request": request, "reply": reply}
        line = json_bytes(call).decode()
        with self._lock:
            if self._file is None:
                private_folder(self._path.parent)
                self._file = open_private(self._path, "a")
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file; may be called twice, and recording may continue after it."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _read(self, path: Path) -> None:
        try:
            content = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"replay={str(path)!r} cannot be read: {error}. Create it with record=") from error
        lines = content.removesuffix("\n").split("\n") if content else []  # at no other line end: texts contain them
        for number, line in enumerate(lines, 1):
            try:
                call = json.loads(line)
                route, request, reply = call["route"], call["request"], call["reply"]
            except (ValueError, KeyError, TypeError) as error:
                text = "expected a JSON object with route, request and reply, as record= writes it"
                raise ValueError(f"replay={str(path)!r}, line {number}: {text} ({error!r})") from None
            key = _key(route, request)
            self._calls.setdefault(key, []).append(reply)
            self._requests.setdefault(key, {"route": route, **request})

    def _nearest(self, route: str, request: Json) -> str | None:
        """Return the key of the most similar request, of the same route and model."""
        matcher = difflib.SequenceMatcher(autojunk=False)
        matcher.set_seq2(_ends(_text(request)))
        best: tuple[float, str | None] = (0.0, None)
        for key, other in self._requests.items():
            if other["route"] == route and other.get("model") == request.get("model"):
                matcher.set_seq1(_ends(_text(other)))
                likeness = matcher.quick_ratio()
                best = max(best, (likeness, key), key=lambda pair: pair[0])
        return best[1]


def _key(route: str, request: Mapping[str, object]) -> str:
    fields = {name: value for name, value in request.items() if name not in _WITHOUT_EFFECT}
    text = json.dumps([route, fields], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _ends(text: str) -> str:
    """Return a text, or the beginning and the end of a long one, because the compared length is limited."""
    return text if len(text) <= 2 * _COMPARED else text[:_COMPARED] + text[-_COMPARED:]


def _text(request: Mapping[str, object]) -> str:
    content = request.get("messages") or request.get("prompt") or request.get("input")
    parts = content if is_list(content) else [content]
    return "\n".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts)
