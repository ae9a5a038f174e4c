"""Sums as a task of Inspect, with the scorer that also gives the reward in training."""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false
# Inspect is in a separate environment (constraints.txt), where its types are known.

import random
import re

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer, stderr
from inspect_ai.solver import TaskState, generate

HELD_OUT_SEED, HELD_OUT_SIZE = 1, 20


def samples(size: int, seed: int) -> list[Sample]:
    """Return sums of two numbers. The same seed gives the same sums."""
    chance = random.Random(seed)
    pairs = [(chance.randint(10, 99), chance.randint(10, 99)) for _ in range(size)]
    return [Sample(id=i, input=f"What is {a} plus {b}?", target=str(a + b)) for i, (a, b) in enumerate(pairs)]


@scorer(metrics=[accuracy(), stderr()])
def last_number() -> Scorer:
    """The last number of the reply is the answer."""

    async def score(state: TaskState, target: Target) -> Score:
        answer = (re.findall(r"-?\d+", state.output.completion) or [""])[-1]
        return Score(value=CORRECT if answer == target.text else INCORRECT, answer=answer)

    return score


@task
def sums(size: int = HELD_OUT_SIZE, seed: int = HELD_OUT_SEED) -> Task:
    return Task(dataset=MemoryDataset(samples(size, seed)), solver=generate(), scorer=last_number())
