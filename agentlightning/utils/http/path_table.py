"""Which endpoint serves a path: literal segments, parameters in braces, percent-encoding taken out per segment."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Generic, TypeVar
from urllib.parse import unquote_to_bytes

from agentlightning.errors import BadRequestError
from agentlightning.utils.http.auth import Scope

E = TypeVar("E")


class PathTable(Generic[E]):
    """Endpoints by path and method. Literal segments win over parameters; an escaped slash belongs to its segment."""

    def __init__(self, endpoints: Iterable[tuple[str, str, E]]) -> None:
        self._literal: dict[str, dict[str, E]] = {}
        self._shapes: dict[int, list[_Shape[E]]] = {}
        shapes: dict[tuple[int, tuple[int, ...]], _Shape[E]] = {}
        for path, method, endpoint in endpoints:
            if "{" in path:
                segments = path.split("/")
                form = len(segments), tuple(i for i, segment in enumerate(segments) if segment.startswith("{"))
                shapes.setdefault(form, _Shape(*form)).add(path, method, endpoint)
            else:
                self._literal.setdefault(path, {})[method] = endpoint
        for form in sorted(shapes):
            self._shapes.setdefault(form[0], []).append(shapes[form])

    def find(self, scope: Scope, method: str) -> tuple[dict[str, E] | None, dict[str, str]]:
        """Return the methods of the path that fits best and serves this method, else of one that fits at all, and the
        values of its parameters. HEAD is served where GET is.

        Raises:
            BadRequestError: the path is no valid UTF-8.
        """
        path: str = scope["path"]
        raw: bytes = scope.get("raw_path") or b""
        parts: list[str] | None = None
        words: list[str] | None = None
        if b"%" in raw:  # what is escaped is a value, even if it spells a word of a path
            written = raw.split(b"?", 1)[0].split(b"/")
            parts = [_text(part) for part in written]
            words = ["" if b"%" in part else part.decode("latin-1") for part in written]
            path = "" if "" in words[1:] else path
        other = self._literal.get(path)
        if other is not None and method in other:
            return other, {}
        parts = parts or path.split("/")
        words = words or parts
        for shape in self._shapes.get(len(parts), ()):
            found = shape.table.get(shape.literals(words))
            if found is not None:
                methods, names = found
                if method in methods or (method == "HEAD" and "GET" in methods):
                    return methods, {name: parts[index] for name, index in names}
                other = other or methods
        return other, {}


class _Shape(Generic[E]):
    """Paths of one length with their parameters at the same places, by their other segments."""

    __slots__ = ("literals", "parameters", "table")

    def __init__(self, length: int, parameters: tuple[int, ...]) -> None:
        self.parameters = parameters
        self.literals = itemgetter(*(index for index in range(length) if index not in parameters))
        self.table: dict[tuple[str, ...], tuple[dict[str, E], list[tuple[str, int]]]] = {}

    def add(self, path: str, method: str, endpoint: E) -> None:
        segments = path.split("/")
        names = [(segments[index][1:-1], index) for index in self.parameters]
        methods, known = self.table.setdefault(self.literals(segments), ({}, names))
        assert known == names, f"{path} names its parameters otherwise than the same path with another method"
        methods[method] = endpoint


def _text(part: bytes) -> str:
    try:
        return unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        raise BadRequestError("The path is no valid UTF-8") from None
