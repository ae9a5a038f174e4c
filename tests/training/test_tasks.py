"""The plan has the tasks of a run's steps in their order, and continues anywhere."""

from __future__ import annotations

import random

from agentlightning.training.tasks import GroupKey, GroupPlan, OpenGroups, batch_iter_over_dataset

TASKS = ["one", "two", "three", "four", "five"]


def test_groups_come_in_the_order_of_the_synchronous_run() -> None:
    plan, batches = GroupPlan(TASKS, 2, seed=7), batch_iter_over_dataset(TASKS, 2, random.Random(7))
    keys = [plan.draw("t") for _ in range(8)]
    assert keys == [GroupKey(step, task, "t") for step in (1, 2, 3, 4) for task in (0, 1)]
    assert [plan.tasks_of(key.step)[key.task] for key in keys] == [task for _ in range(4) for task in next(batches)]


def test_another_start_goes_on_with_the_same_tasks() -> None:
    first, again = GroupPlan(TASKS, 2, seed=7), GroupPlan(TASKS, 2, seed=7)
    keys = [first.draw(None) for _ in range(9)]
    again.next = keys[6].place
    assert again.draw(None) == keys[6]
    assert again.next == keys[7].place
    assert [again.tasks_of(key.step)[key.task] for key in keys] == [first.tasks_of(key.step)[key.task] for key in keys]


def test_fewer_tasks_than_a_step_asks_for_are_all_of_them() -> None:
    plan = GroupPlan(["only"], 16, seed=0)
    assert plan.size == 1
    assert [plan.draw(None).place for _ in range(3)] == [(1, 0), (2, 0), (3, 0)]


def test_what_is_still_to_come_after_a_checkpoint_is_what_was_open_and_what_was_not_given_out() -> None:
    open_groups = OpenGroups({"next": [4, 1], "open": [[2, 0, None], [4, 0, "b"]]})
    takes = {None, "b"}
    assert open_groups.concerns({"step": 2, "task": 0, "sample": 3}, takes)
    assert open_groups.concerns({"step": 4, "task": 0, "take": "b"}, takes)
    assert open_groups.concerns({"step": 4, "task": 1}, takes)
    assert open_groups.concerns({"step": 9, "task": 0, "take": "b"}, takes)
    assert not open_groups.concerns({"step": 9, "task": 0, "take": "undone"}, takes)
    assert not open_groups.concerns({"step": 3, "task": 0}, takes)  # trained before the checkpoint
    assert not open_groups.concerns({"step": 4, "task": 0}, takes)  # of another take
    assert not open_groups.concerns({}, takes)
