"""What a server does to the garbage collector of its process, and that it takes it back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from agentlightning.store.http.server import LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.utils.concurrency import collector
from agentlightning.utils.concurrency.collector import freeze_for_good, short_pauses

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tests' own process has frozen what collection loaded (tests/conftest.py)."""
    monkeypatch.setattr(collector, "_for_good", False)
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


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


async def test_what_was_frozen_for_good_stays_so_after_a_server():
    before = Cycle()
    freed_before = weakref.ref(before)
    freeze_for_good()
    during = Cycle()
    freed_during = weakref.ref(during)
    server = LightningStoreServer(InMemoryLightningStore(), host="127.0.0.1", port=0)
    await server.start()
    del before, during
    gc.collect()
    assert freed_during() is None, "a server takes nothing more out of collections"
    await server.stop()
    gc.collect()
    assert freed_before() is not None
