"""Heartbeats of idle workers: they are written together where many come, and each counts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentlightning.errors import TokenReusedError
from agentlightning.store.engine.calls import IdleBeats
from agentlightning.store.sqlite import SQLiteLightningStore
from tests.store.parts import with_token


def _waits(beats: IdleBeats) -> bool:
    """Return whether a heartbeat that comes now waits for others."""
    beat = beats.gather()
    try:
        beat.send(None)
    except StopIteration:
        return False
    beat.close()
    return True


async def test_a_heartbeat_waits_for_others_only_where_many_come() -> None:
    now = [100.1]
    beats = IdleBeats(lambda: now[0])
    assert [_waits(beats) for _ in range(40)] == [False] * 32 + [True] * 8
    now[0] += 1.0
    assert not _waits(beats)


async def test_each_of_many_heartbeats_at_once_is_recorded_and_a_reused_token_is_refused_alone(tmp_path: Path) -> None:
    store = SQLiteLightningStore(str(tmp_path / "store.db"))

    async def beat(number: int, token: str) -> object:
        return await with_token(token, store.update_worker(f"w{number % 100}", {"number": number}, attempts=[]))

    calls = [beat(number, f"token {number}") for number in range(100)] + [beat(100, "token 0"), beat(101, "token x")]
    *answers, reused, _ = await asyncio.gather(*calls, return_exceptions=True)
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []
    assert isinstance(reused, TokenReusedError)
    await store.close()
    reopened = SQLiteLightningStore(str(tmp_path / "store.db"))
    stats = {worker.worker_id: worker.heartbeat_stats for worker in await reopened.query_workers()}
    assert stats == {f"w{number}": {"number": 101 if number == 1 else number} for number in range(100)}
    await reopened.close()
