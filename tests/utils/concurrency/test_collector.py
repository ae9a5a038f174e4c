"""What a server does to the garbage collector of its process, and that it takes it back."""

from __future__ import annotations

import gc
import weakref

import pytest

from agentlightning.store.http.server import LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.utils.concurrency.collector import short_pauses


class Cycle:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


async def test_a_server_keeps_what_was_loaded_before_it_out_of_collections_until_the_last_one_ends():
    gc.collect()
    before = Cycle()
    freed_before = weakref.ref(before)
    first = LightningStoreServer(InMemoryLightningStore(), host="127.0.0.1", port=0)
    second = LightningStoreServer(InMemoryLightningStore(), host="127.0.0.1", port=0)
    await first.start()
    looked_through = len(gc.get_objects())
    assert looked_through < gc.get_freeze_count() / 2  # what a full collection walks over is the smaller part
    await second.start()
    during = Cycle()
    freed_during = weakref.ref(during)
    del before, during
    await first.stop()
    gc.collect()
    assert freed_before() is not None
    assert freed_during() is None  # what comes after a server's begin is collected as ever
    await second.stop()
    gc.collect()
    assert freed_before() is None


def test_a_block_that_fails_gives_its_objects_back():
    before = Cycle()
    freed = weakref.ref(before)
    with pytest.raises(KeyError), short_pauses():
        raise KeyError
    del before
    gc.collect()
    assert freed() is None
