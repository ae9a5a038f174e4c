"""One change of the data in Redis: read, decide, and write all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel
from redis.exceptions import WatchError

import agentlightning as agl
from agentlightning.store.base import is_finished, is_queuing
from agentlightning.store.rules.lifecycle import check_rollout_change
from agentlightning.types import Rollout, RolloutStatus

T = TypeVar("T")


class Change:
    """The reads and the planned writes of a change. Every key that is read is watched from then on."""

    def __init__(self, pipe: Any, prefix: str) -> None:
        self._pipe, self._prefix = pipe, prefix
        self.writes: list[tuple[Any, ...]] = []

    def read(self, command: str, key: str, *arguments: Any) -> Any:
        self._pipe.watch(self._prefix + key)
        return self._pipe.execute_command(command, self._prefix + key, *arguments)

    def write(self, command: str, key: str, *arguments: Any) -> None:
        self.writes.append((command, self._prefix + key, *arguments))

    def rollout(self, rollout_id: str) -> Rollout:
        """Read a rollout.

        Raises:
            NotFoundError: no rollout has this id.
        """
        text = self.read("GET", f"rollout:{rollout_id}")
        if text is None:
            raise agl.NotFoundError(f"Rollout {rollout_id} not found")
        return Rollout.model_validate_json(text)

    def write_rollout(self, rollout: Rollout, status: RolloutStatus, end_time: float | None) -> Rollout:
        """Write a rollout with this status; also add it to the queue if it can be claimed (again).

        Raises:
            ConflictError: the present status does not allow the new one.
        """
        if check_rollout_change(rollout.rollout_id, rollout.status, status):
            rollout = rollout.model_copy(update={"status": status, "end_time": None})
            if is_finished(rollout):
                rollout = rollout.model_copy(update={"end_time": end_time})
            if is_queuing(rollout):
                self.write("RPUSH", "queue", rollout.rollout_id)
        self.write("SET", f"rollout:{rollout.rollout_id}", to_json(rollout))
        return rollout


def change(redis: Any, prefix: str, decide: Callable[[Change], T]) -> T:
    """Return the result of `decide`, and call it again as long as another client changes what it has read."""
    while True:
        with redis.pipeline() as pipe:
            one = Change(pipe, prefix)
            try:
                result = decide(one)
                pipe.multi()
                for command in one.writes:
                    pipe.execute_command(*command)
                pipe.execute()
            except WatchError:
                continue
            return result


def to_json(value: BaseModel) -> str:
    """Return the stored JSON of a value; an attempt is stored apart from its rollout."""
    return value.model_dump_json(exclude={"attempt"})
