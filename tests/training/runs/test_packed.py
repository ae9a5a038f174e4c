"""Numbers come back out of JSON bit for bit, and what is no packed list is told apart."""

from __future__ import annotations

import base64
import json
import math
import struct

import numpy as np
import pytest

from agentlightning.training.runs.packed import pack, unpack


def test_numbers_come_back_bit_for_bit_through_json() -> None:
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    packed = json.loads(json.dumps(pack(values.tolist(), "f32")))
    assert np.frombuffer(unpack(packed), np.float32).tobytes() == values.tobytes()
    assert list(unpack(pack([-1, 0, 2**31 - 1], "i32"))) == [-1, 0, 2**31 - 1]
    assert list(unpack(pack([True, False], "u8"))) == [1, 0]
    assert list(unpack(pack([], "f32"))) == []


def test_the_bytes_are_little_endian_and_keep_what_is_not_finite() -> None:
    packed = pack([1.5, math.inf, math.nan], "f32")
    assert base64.b64decode(packed["data"])[:8] == struct.pack("<ff", 1.5, math.inf)
    assert math.isnan(unpack(packed)[2])


def test_a_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack([256], "u8")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([1, 2], "got list"),
        ({"dtype": "f64", "data": ""}, "f32, i32, u8"),
        ({"dtype": "f32"}, "data a text"),
        ({"dtype": "f32", "data": "a?"}, "not base64 of f32"),
        ({"dtype": "f32", "data": base64.b64encode(b"abcde").decode()}, "not base64 of f32"),
    ],
)
def test_what_is_no_packed_list_is_told(wrong: object, told: str) -> None:
    with pytest.raises(ValueError, match=told.replace("?", r"\?")):
        unpack(wrong)
