"""Memory stays flat under steady load. The suite's version is short; `make soak` runs half an hour."""

from __future__ import annotations

import os

import pytest

from tests.chaos.soak import soak_all

WARM_UP_SECONDS = float(os.environ.get("AGL_SOAK_WARM_UP_SECONDS", "120"))
SECONDS = float(os.environ.get("AGL_SOAK_SECONDS", "180"))
RATE = 50.0


@pytest.mark.slow
@pytest.mark.timeout(WARM_UP_SECONDS + SECONDS + 120)
def test_memory_stays_flat_while_retention_removes_what_has_ended() -> None:
    measurements = soak_all(["memory", "sqlite"], RATE, WARM_UP_SECONDS, SECONDS)
    print(*measurements, sep="\n")
    for one in measurements:
        assert one.done > 10 * (WARM_UP_SECONDS + SECONDS), f"too little was done to say anything: {one}"
        assert one.flat, one
