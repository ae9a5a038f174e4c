"""Ledger records hold the numbers of the loss bit for bit, and their document names every reason."""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from agentlightning.training.ledger import ExclusionReason
from agentlightning.training.ledger_records import pack, unpack

DOCUMENT = Path(__file__).parents[2] / "docs/deep-dive/ledger.md"


def test_the_document_names_every_reason() -> None:
    text = DOCUMENT.read_text()
    assert [reason for reason in get_args(ExclusionReason) if not re.search(rf"^\|.*`{reason}`.*\|", text, re.M)] == []


def test_numbers_come_back_bit_for_bit_through_json_as_little_endian_bytes() -> None:
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    packed = json.loads(json.dumps(pack(values.tolist(), "f32")))
    assert np.frombuffer(unpack(packed), np.float32).tobytes() == values.tobytes()
    assert list(unpack(pack([-1, 0, 2**31 - 1], "i32"))) == [-1, 0, 2**31 - 1]
    assert list(unpack(pack([], "f32"))) == []
    not_finite = pack([1.5, math.inf, math.nan], "f32")
    assert base64.b64decode(not_finite["data"])[:8] == struct.pack("<ff", 1.5, math.inf)
    assert math.isnan(unpack(not_finite)[2])
    with pytest.raises(OverflowError):
        pack([256], "u8")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1, 2], "got list"),
        ({"dtype": "f64", "data": ""}, "f32, i32, u8"),
        ({"dtype": "f32"}, "data a string"),
        ({"dtype": "f32", "data": "a?"}, "not base64 of f32"),
        ({"dtype": "f32", "data": base64.b64encode(b"abcde").decode()}, "not base64 of f32"),
    ],
)
def test_what_is_no_packed_list_is_told(wrong: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack(wrong)
