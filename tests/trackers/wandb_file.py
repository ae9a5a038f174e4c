"""Reads what W&B writes offline: records of its protocol in a log of LevelDB's format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7
_FULL, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a `.wandb` file."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    assert content[:4] == b":W&B"
    place, parts = _HEADER, b""
    while place + _HEADER <= len(content):
        remaining = _BLOCK - place % _BLOCK
        if remaining < _HEADER:
            place += remaining
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts += content[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record
