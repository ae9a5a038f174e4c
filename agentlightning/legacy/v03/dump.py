"""JSON files: output of `mongoexport`, responses of the v0.3 server, or one file with four lists.

A folder holds `rollouts.json`, `attempts.json`, `spans.json` and `resources.json`, or several files of a kind
(`spans-1.json`), or `.jsonl`. A file is a list, an object with `items`, or one document per line. It is read in
pieces, so it may be larger than the memory. A single file with all four lists is read completely into memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from agentlightning.errors import BadRequestError
from agentlightning.legacy.v03.source import KINDS, Document, Kind

_CHUNK = 1 << 16
_SPACE = re.compile(r"[\s,]*")
_LIST = re.compile(r'\s*(?:\{\s*"items"\s*:\s*)?\[')
_decode = json.JSONDecoder().raw_decode


class DumpSource:
    """A file or a folder."""

    def __init__(self, place: Path) -> None:
        self.name = str(place)
        self._whole: dict[str, list[Any]] | None = None
        self._files: dict[Kind, list[Path]] = {}
        if place.is_dir():
            files = [file for file in sorted(place.iterdir()) if file.is_file()]
            self._files = {
                kind: [file for file in files if re.fullmatch(kind + r"\b.*\.(json|jsonl|ndjson)", file.name)]
                for kind in KINDS
            }
            if not any(self._files.values()):
                raise BadRequestError(
                    f"{place} holds none of {', '.join(f'{kind}.json' for kind in KINDS)} (or .jsonl)"
                )
        else:
            self._whole = _whole(place)
        self._embedded = not self._files.get("attempts") and not (self._whole or {}).get("attempts")

    async def check(self) -> None:
        """Do nothing: the source was checked when it was opened."""

    async def documents(self, kind: Kind) -> AsyncIterator[Document]:
        """Yield documents; without a list of attempts, yield the attempt in each rollout."""
        if kind == "attempts" and self._embedded:
            for rollout in self._read("rollouts"):
                if isinstance(attempt := rollout.get("attempt"), dict):
                    yield cast("Document", attempt)
            return
        for document in self._read(kind):
            yield document

    async def left_behind(self) -> Mapping[str, int]:
        others = [name for name in self._whole or () if name not in KINDS]
        return {name: len(cast("dict[str, list[Any]]", self._whole)[name]) for name in others}

    async def close(self) -> None:
        """Do nothing: no file is open."""

    def _read(self, kind: Kind) -> Iterator[Document]:
        if self._whole is not None:
            for number, item in enumerate(self._whole.get(kind, ()), start=1):
                yield _document(item, f"{self.name}, {kind}", number)
            return
        for file in self._files[kind]:
            for number, item in enumerate(_items(file), start=1):
                yield _document(item, str(file), number)


def _whole(file: Path) -> dict[str, list[Any]]:
    hint = f"expected one object of lists, {{{', '.join(f'{kind}: [...]' for kind in KINDS)}}}, or a folder"
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequestError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise BadRequestError(f"{file} is not valid JSON ({error}); {hint}") from None
    lists = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    if not set(KINDS) & lists.keys() or not all(isinstance(lists.get(kind, []), list) for kind in KINDS):
        shape = f"an object of {', '.join(list(map(str, lists))[:8]) or 'nothing'}"
        raise BadRequestError(
            f"{file} holds {shape if isinstance(content, dict) else f'a {type(content).__name__}'}; {hint}"
        )
    return {name: value for name, value in lists.items() if isinstance(value, list)}


def _document(item: object, file: str, number: int) -> Document:
    if not isinstance(item, dict):
        raise BadRequestError(f"{file}, item {number} is a {type(item).__name__}; expected an object")
    return cast("Document", item)


def _items(file: Path) -> Iterator[object]:
    """Yield the items of a list, of an object with `items`, or of lines, without holding all of them in memory.

    Raises:
        BadRequestError: the file is not JSON; the message has the number of the last valid item.
    """
    number = 0
    try:
        with file.open(encoding="utf-8-sig") as stream:
            buffer, step, at_end = stream.read(_CHUNK), _CHUNK, False
            head = _LIST.match(buffer)
            place = 0 if head is None else head.end()
            while True:
                place = cast("re.Match[str]", _SPACE.match(buffer, place)).end()
                if head is not None and buffer[place : place + 1] == "]":
                    return
                try:
                    item, end = _decode(buffer, place)
                except ValueError:
                    if not at_end:  # doubled each time, so that a long item is not parsed too often
                        more = stream.read(step)
                        at_end, step = not more, step * 2
                        buffer, place = buffer[place:] + more, 0
                        continue
                    if head is None and place == len(buffer):
                        return
                    raise
                number, place = number + 1, end
                yield item
                if place > _CHUNK:
                    buffer, place, step = buffer[place:], 0, _CHUNK
    except ValueError as error:
        raise BadRequestError(f"{file} is not valid JSON after item {number}: {error}") from None
    except OSError as error:
        raise BadRequestError(f"{file}: {error.strerror}") from None
