"""reasoning-gym (https://github.com/open-thought/reasoning-gym): generated reasoning tasks that check their answers."""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import re
from collections.abc import Mapping
from typing import Any, cast

from typing_extensions import override

from agentlightning.environments.graded import answer_of
from agentlightning.litagent.litagent import LitAgent
from agentlightning.types import NamedResources, Rollout
from agentlightning.utils.setting_checks import check_count

INSTRUCTION = "Solve the task. Write the final answer, and nothing else, between <answer> and </answer>."
_NEEDS_TUPLES = frozenset({"arc_agi", "rearc"})
"""Data sets whose check compares tuples, which JSON turns into lists."""
_OWN_FIELDS = ("dataset", "config")


def reasoning_gym(name: str, *, size: int, seed: int = 0, **config: Any) -> list[dict[str, Any]]:
    """Generate tasks of a data set of reasoning-gym, for `ReasoningGymAgent` or an agent of your own.

    ```python
    tasks = agl.environments.reasoning_gym("chain_sum", size=60, seed=1, max_terms=3)
    trainer.fit(agl.environments.ReasoningGymAgent(), train_dataset=tasks[:40], val_dataset=tasks[40:])
    ```

    Args:
        name: name of the data set, such as "chain_sum".
        size: number of tasks.
        seed: seed of the generator.
        config: settings of the data set, which control its difficulty; JSON values.

    Returns:
        A dict for each task, which is valid JSON: `dataset`, `config`, `question`, and `answer` and `metadata`, which
        the score needs. The agent must not show these two to the model.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: there is no such data set, or it does not accept the settings.
    """
    check_count("size", size)
    data_set = _data_set(name, size, seed, config)
    return [
        {"dataset": name, "config": config, **json.loads(json.dumps(data_set[number], default=str))}
        for number in range(size)
    ]


def score_reasoning_gym(answer: str | None, task: Mapping[str, Any]) -> float:
    """Return the reward of an answer to a task of `reasoning_gym`, from 0 to 1, as its data set defines it.

    Most data sets give 1 for the right answer and a small reward for an answer of the right form. None is no answer.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: the task is not one of `reasoning_gym`.
    """
    if missing := [field for field in (*_OWN_FIELDS, "question", "metadata") if field not in task]:
        raise ValueError(f"The task must be one of reasoning_gym(...); it has no {', '.join(missing)}")
    entry: Any = {key: value for key, value in task.items() if key not in _OWN_FIELDS}
    if task["dataset"] in _NEEDS_TUPLES:
        entry = _as_tuples(entry)
    return float(_scorer(task["dataset"], json.dumps(task["config"], sort_keys=True)).score_answer(answer, entry))


class ReasoningGymAgent(LitAgent[Any]):
    """Asks the model once, and returns the score of the text that it writes between `<answer>` and `</answer>`.

    A reply without this text gets the score of no answer, which is 0 in most data sets. The last such text counts.

    Args:
        instruction: the system message, which must state the form of the answer.
    """

    needs_resources = True

    def __init__(self, instruction: str = INSTRUCTION) -> None:
        super().__init__()
        self.instruction = instruction

    @override
    async def rollout_async(self, task: dict[str, Any], resources: NamedResources, rollout: Rollout) -> float:
        """Run one task.

        Raises:
            ChatError: the model call failed.
            ValueError: no LLM is among the resources, or the task is not one of `reasoning_gym`.
        """
        messages = [{"role": "system", "content": self.instruction}, {"role": "user", "content": task["question"]}]
        reply = await answer_of("ReasoningGymAgent", messages, resources, rollout)
        found = re.findall(r"<answer>(.*?)</answer>", reply, re.DOTALL)
        return score_reasoning_gym(found[-1].strip() if found else None, task)


def data_sets() -> list[str]:
    """Return the names of the data sets of reasoning-gym.

    Raises:
        ImportError: reasoning-gym is not installed.
    """
    return sorted(set(_factory().DATASETS) - {"composite"})


def _factory() -> Any:
    try:
        return importlib.import_module("reasoning_gym.factory")
    except ModuleNotFoundError as error:
        if error.name not in ("reasoning_gym", "reasoning_gym.factory"):
            raise  # it is installed, but one of its own imports is missing
        raise ImportError(
            "agl.environments.reasoning_gym requires the package reasoning-gym, which is not installed. "
            "Run pip install 'agl-framework[reasoning-gym]'",
            name=error.name,
        ) from error


def _data_set(name: str, size: int, seed: int, config: Mapping[str, Any]) -> Any:
    factory = _factory()
    names = sorted(cast("dict[str, Any]", factory.DATASETS))
    if name not in names:
        near = difflib.get_close_matches(name, names, 3) or names[:3]
        raise ValueError(f"reasoning-gym has no data set {name!r}; it has {len(names)}, such as {', '.join(near)}")
    if name == "composite":
        raise ValueError("The data set 'composite' is not supported: join the task lists of several data sets instead")
    try:
        json.dumps(config)
        return factory.create_dataset(name, size=size, seed=seed, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"The data set {name!r} does not accept the settings {dict(config)!r}: {error}") from error


@functools.lru_cache(maxsize=64)
def _scorer(name: str, config: str) -> Any:
    return _data_set(name, 1, 0, json.loads(config))


def _as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_tuples(each) for key, each in cast("dict[str, Any]", value).items()}
    return tuple(map(_as_tuples, cast("list[Any]", value))) if isinstance(value, list) else value
