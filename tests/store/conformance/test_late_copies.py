"""A request that is delivered again, when the world has gone on, changes nothing and is answered like the first one."""

from __future__ import annotations

import pytest

from agentlightning.store.base import LightningStore
from agentlightning.store.operations import OPERATIONS
from tests.store.conformance.late_copies import STORIES, Story, check_late_copy


def test_every_operation_that_carries_a_token_has_a_story() -> None:
    assert {each.name for each in OPERATIONS.values() if each.retry == "token"} <= {
        story.operation for story in STORIES
    }


@pytest.mark.parametrize("story", STORIES, ids=str)
async def test_a_copy_that_comes_late_changes_nothing(store: LightningStore, story: Story) -> None:
    async def here() -> LightningStore:
        return store

    await check_late_copy(story, store, here)
