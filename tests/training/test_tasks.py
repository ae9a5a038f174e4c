"""The plan has the tasks of a run's steps in their order or by solve rate, and continues anywhere."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from agentlightning.training.tasks import Curriculum, GroupKey, GroupPlan, OpenGroups, batch_iter_over_dataset

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


def test_without_shuffling_each_pass_has_the_order_of_the_dataset() -> None:
    plan = GroupPlan(TASKS, 2, seed=7, shuffle=False)
    steps = [plan.tasks_of(step) for step in range(1, 6)]
    assert steps == [["one", "two"], ["three", "four"], ["five", "one"], ["two", "three"], ["four", "five"]]


def solved(curriculum: Curriculum, shares: dict[int, float], size: int = 10) -> dict[str, float]:
    """Add a group for each task, with this share of rewards of 1."""
    return curriculum.add([(task, [float(n < size * share) for n in range(size)]) for task, share in shares.items()])


def test_tasks_of_a_rate_near_one_half_are_drawn_most_and_every_task_remains_in_the_draw() -> None:
    curriculum = Curriculum(40, seed=3, solved_above=None)
    for _ in range(3):
        solved(curriculum, {task: (0.0, 0.5, 1.0, 0.5)[task % 4] for task in range(20)})
    counts = Counter(task for step in range(1, 1001) for task in curriculum.draw(step, 0, range(40), 4))
    useful, useless, unseen = (
        sum(counts[task] for task in tasks) / len(tasks) for tasks in (range(1, 20, 2), range(0, 20, 2), range(20, 40))
    )
    assert useful > 4 * useless
    assert unseen == pytest.approx(useful, rel=0.1)
    assert min(counts.values()) > 0
    assert len(counts) == 40


@pytest.mark.parametrize(
    ("solved_above", "rewards", "rate"),
    [
        (None, [], 0.5),
        (None, [1.0] * 200, 0.976),
        (None, [0.0] * 200, 0.024),
        (None, [0.4] * 200, 0.405),
        (None, [-1.0] * 200, 0.024),  # -1 is the least reward of the run
        (0.3, [0.4] * 200, 0.976),
        (0.4, [0.4] * 200, 0.024),
        (5.0, [9.0, 1.0] * 100, 0.474),  # the later of two counts more
        (None, [0.0], 0.167),  # one rollout alone does not decide
    ],
)
def test_a_solve_rate_is_the_share_above_the_limit_or_the_mean_on_the_scale_of_the_rewards(
    solved_above: float | None, rewards: list[float], rate: float
) -> None:
    curriculum = Curriculum(2, seed=0, solved_above=solved_above)
    curriculum.add([(1, rewards)])
    assert curriculum.rate(1) == pytest.approx(rate, abs=1e-3)
    assert curriculum.rate(0) == 0.5


def test_a_curriculum_tells_the_rates_of_the_drawn_tasks_before_their_step() -> None:
    curriculum = Curriculum(10, seed=0, solved_above=None)
    assert solved(curriculum, {0: 1.0, 1: 0.0}) == {"solve_rate": 0.5, "seen": 0.2, "most_groups": 1}
    again = solved(curriculum, {0: 1.0, 2: 0.0})
    assert again == {"solve_rate": pytest.approx((rate_of_ten_solved() + 0.5) / 2), "seen": 0.3, "most_groups": 2}
    assert curriculum.add([(5, [])])["seen"] == 0.4  # all rollouts of the group failed
    assert curriculum.rate(5) == 0.5


def rate_of_ten_solved() -> float:
    """Return the rate of a task after ten rewards of 1: the weights of the rollouts are 0.9 ** n."""
    weight = sum(0.9**n for n in range(10))
    return (weight + 0.25) / (weight + 0.5)


def test_a_restored_curriculum_draws_the_same_tasks_and_a_repeated_step_too() -> None:
    first, again = (Curriculum(20, seed=1, solved_above=None) for _ in range(2))
    plan = GroupPlan(range(20), 4, 1, curriculum=first)
    rng = random.Random(0)
    for step in (1, 2, 3):
        first.add([(task, [rng.random() for _ in range(3)]) for task in plan.indices_of(step)])
    again.restore(json.loads(json.dumps(first.state())))
    resumed = GroupPlan(range(20), 4, 1, curriculum=again)
    resumed.next = (4, 0)
    assert again.state() == first.state()
    drawn = plan.indices_of(4)
    assert [resumed.indices_of(4), first.draw(4, 0, range(20), 4)] == [drawn, drawn]
    others = plan.others(4, 1, drawn, 3)
    assert resumed.others(4, 1, drawn, 3) == others
    assert not set(others) & set(drawn)
    assert len(set(others)) == 3
