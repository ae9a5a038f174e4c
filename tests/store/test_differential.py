"""Every store answers the same operations alike: each backend, in process and over HTTP, compared with memory.

`AGL_STORIES=40` tells so many stories of 500 operations; the suite tells one short one, `make test-heavy` 40.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from unittest import mock

import pytest

from agentlightning.store.engine.clock import SharedClock
from agentlightning.store.memory import InMemoryLightningStore
from tests.chaos.stores import fresh_place
from tests.store.differential import Story
from tests.store.parts import serving

SETTINGS = {"scan_debounce_seconds": 1e9, "lease_seconds": 1e9, "synchronous": "NORMAL"}
PLACES = [(kind, over) for over in ("in process", "over HTTP") for kind in ("memory", "sqlite", "postgres", "mongo")]


@pytest.mark.parametrize(("kind", "over"), PLACES[1:])
async def test_a_story_is_answered_as_memory_answers_it(
    kind: str, over: str, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    await compare(int(os.environ.get("AGL_STORY", "1")), 100, kind, over, request, tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("story", range(int(os.environ.get("AGL_STORIES", "40"))))
async def test_twenty_thousand_operations_are_answered_as_memory_answers_them(
    story: int, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for number, (kind, over) in enumerate(PLACES[1:]):
        (tmp_path / str(number)).mkdir()
        await compare(100 + story, 500, kind, over, request, tmp_path / str(number))


async def compare(seed: int, steps: int, kind: str, over: str, request: pytest.FixtureRequest, folder: Path) -> None:
    """Run one story in memory and in another store, and compare the answers one by one."""
    expected_story, story = Story(seed), Story(seed)
    with mock.patch.object(SharedClock, "set"):
        with mock.patch("time.time", expected_story.time):
            memory = InMemoryLightningStore(scan_debounce_seconds=1e9, lease_seconds=1e9)
            expected = await expected_story.tell(memory, steps)
            await memory.close()
        with mock.patch("time.time", story.time):
            async with fresh_place(kind, request, folder).opened(**SETTINGS) as store, serving(store) as (_, client):
                answers = await story.tell(store if over == "in process" else client, steps)
    for number, (answer, expected_answer) in enumerate(zip(answers, expected, strict=True)):
        assert answer == expected_answer, f"step {number} of story {seed}: {expected_story.asked[number]}"
