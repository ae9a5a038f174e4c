"""Lists of numbers as JSON holds them exactly: little-endian bytes in base64, with the name of their type.

Decimal digits would cost three times the bytes, and a reader would have to trust that all of them were written. Needs
no numpy; `numpy.frombuffer(base64.b64decode(packed["data"]), "<f4")` reads one elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import sys
from array import array
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, cast

Dtype = Literal["f32", "i32", "u8"]
_CODES: dict[str, str] = {"f32": "f", "i32": "i", "u8": "B"}
"""Type codes of `array`; an `i` has four bytes wherever Python 3.11 runs."""


class Packed(TypedDict):
    """A list of numbers as records hold it."""

    dtype: Dtype
    """`f32`: IEEE 754 single precision. `i32`: signed. `u8`: unsigned, of masks and decisions."""
    data: str
    """The numbers one after another, little-endian, in base64."""


def pack(values: Sequence[float] | array[Any], dtype: Dtype) -> Packed:
    """Return the values, a list or a numpy array, in their packed form. `f32` rounds to it; NaN and infinity stay.

    Raises:
        OverflowError: a whole number does not fit the type.
    """
    given = cast("Any", values)
    numbers = array(_CODES[dtype], given.tolist() if hasattr(given, "tolist") else given)
    if sys.byteorder == "big":
        numbers.byteswap()
    return {"dtype": dtype, "data": base64.b64encode(numbers.tobytes()).decode()}


def unpack(packed: object) -> array[Any]:
    """Return the numbers of a packed list: an `array`, which is a buffer too.

    Raises:
        ValueError: it is none; says what is wrong with it.
    """
    if not isinstance(packed, dict):
        raise ValueError(f"packed numbers are {{'dtype': ..., 'data': ...}}; got {type(packed).__name__}")
    dtype, data = packed.get("dtype"), packed.get("data")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType] -- JSON data
    if dtype not in _CODES or not isinstance(data, str):
        raise ValueError(f"dtype must be one of {', '.join(_CODES)} and data a text; got {dtype!r}, {type(data)}")  # pyright: ignore[reportUnknownArgumentType] -- JSON data
    numbers: array[Any] = array(_CODES[dtype])
    try:
        numbers.frombytes(base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"data is not base64 of {dtype} numbers: {error}") from None
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
