"""Durations and sizes as people write them on a command line: `12h`, `500MB`."""

from __future__ import annotations

import re

from agentlightning.errors import BadRequestError

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_BYTES = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def read_seconds(option: str, text: str) -> float:
    """Return the seconds that a text such as `90`, `90m` or `7d` means.

    Raises:
        BadRequestError: it is none; names the option and what is understood.
    """
    return _read(option, text, _SECONDS, "seconds, or a number with one of s, m, h, d (90m)")


def read_bytes(option: str, text: str) -> int:
    """Return the bytes that a text such as `1000000`, `500MB` or `2GiB` means.

    Raises:
        BadRequestError: it is none; names the option and what is understood.
    """
    return int(_read(option, text, _BYTES, "bytes, or a number with one of kB, MB, GB, KiB, MiB, GiB (500MB)"))


def _read(option: str, text: str, units: dict[str, int], expected: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2] not in units:
        raise BadRequestError(f"{option} {text!r}: expected {expected}")
    return float(found[1]) * units[found[2]]
