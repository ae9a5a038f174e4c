"""Data sets with a grading function: their rows as tasks, and an agent that asks the model once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple, cast

from typing_extensions import override

from agentlightning.chat.chat import Chat
from agentlightning.errors import BadRequestError
from agentlightning.litagent.litagent import LitAgent
from agentlightning.trainer.datasets import as_dataset, read_tasks
from agentlightning.training.tasks import items_of
from agentlightning.types import LLM, AttemptedRollout, Dataset, NamedResources, PromptTemplate, ProxyLLM, Rollout
from agentlightning.types.templates.fstring import fill
from agentlightning.utils.rewards import USABLE_REWARD, are_dimensions, as_reward

Grade = Callable[[dict[str, Any], str], Any]
"""Returns the reward of an answer to a task, from the task and the text of the answer: a number, a bool, a dict of
rewards by name with the key `reward`, or None for no reward; sync or async."""


class GradedTasks(NamedTuple):
    """An agent and its tasks, in the order of the arguments of `fit` and `evaluate`."""

    agent: GradedAgent
    """Asks the model once for each task, and grades the answer."""
    tasks: list[dict[str, Any]]
    """The rows of the data set."""


def tasks_from(
    source: str | Path | Dataset[Any] | Iterable[object],
    grade: Grade,
    *,
    prompt: str = "question",
    answer: str | None = None,
    system: str | None = None,
) -> GradedTasks:
    """Return the rows of a data set as tasks, with an agent that asks the model once and grades its answer.

    ```python
    def grade(task, answer):
        return answer.strip().endswith(task["solution"])

    agent, tasks = agl.tasks_from("sums.jsonl", grade, answer="solution")
    trainer.fit(agent, tasks[:900], val_dataset=tasks[900:])
    ```

    Args:
        source: a `.jsonl`, `.json` or `.parquet` file, or a folder of `.parquet` files (which need the package
            pyarrow); or a Hugging Face dataset, a data frame, a list of dicts, or another dataset of `Trainer.fit`.
        grade: returns the reward of an answer: `(task, answer) -> float`; see `Grade`. It runs on the event loop of the
            runner, so a slow one should be a coroutine function.
        prompt: the column with the question, which is a text or a list of chat messages; or a template with columns in
            braces, such as `"{context}\\n\\n{question}"`.
        answer: the column with the reference answer, which `grade` reads from the task. It is only checked.
        system: the system message.

    Raises:
        TypeError, ValueError: the source is not a dataset, has no rows, or a row is not an object or has no such
            column; the message has its number.
        ImportError: pyarrow is not installed.
    """
    if not callable(grade):
        raise TypeError(f"grade must be a function (task, answer) -> float; got {grade!r}")
    agent, place = GradedAgent(grade, prompt, system), "the dataset"
    if isinstance(source, str | Path):
        place, source = str(source), read_tasks("source", source, other=", or a dataset that is already loaded")
    rows = items_of(as_dataset("source", source))
    if not rows:
        raise BadRequestError(f"source: {place} has no rows")
    tasks: list[dict[str, Any]] = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise BadRequestError(f"source: row {number} of {place} must be an object of columns; got {row!r:.80}")
        task = dict(cast("Mapping[str, Any]", row))
        needed = (*agent.columns, *(() if answer is None else (answer,)))
        if missing := [column for column in needed if task.get(column) is None]:
            raise BadRequestError(
                f"source: row {number} of {place} has no {', '.join(map(repr, missing))}; it has "
                f"{', '.join(repr(name) for name, value in task.items() if value is not None) or 'no values'}. Set "
                "prompt= and answer= to names of columns"
            )
        try:
            agent.question(task)
        except (ValueError, KeyError) as error:
            raise BadRequestError(f"source: row {number} of {place}: {error}") from None
        tasks.append(task)
    return GradedTasks(agent, tasks)


class GradedAgent(LitAgent[Any]):
    """Asks the model once, and returns the grade of its answer.

    Args:
        grade, prompt, system: see `tasks_from`.

    Raises:
        ValueError: the template `prompt` is invalid.
    """

    needs_resources = True

    def __init__(self, grade: Grade, prompt: str = "question", system: str | None = None) -> None:
        super().__init__()
        self.grade, self.prompt, self.system = grade, prompt, system
        self.columns = [prompt]
        """Columns of the prompt."""
        if "{" in prompt:
            PromptTemplate(template=prompt, engine="f-string")
            names = [name for _, name, _, _ in Formatter().parse(prompt) if name is not None]
            self.columns = list(dict.fromkeys(name.partition("[")[0] for name in names))

    def question(self, task: Mapping[str, Any]) -> str | list[Any]:
        """Return the question of a task, a text or a list of chat messages.

        Raises:
            ValueError: it is neither, or the template cannot be filled.
        """
        content = task.get(self.prompt) if "{" not in self.prompt else fill(self.prompt, task)
        if not isinstance(content, str | list):
            raise BadRequestError(f"{self.prompt!r} must be a text or a list of messages; got {content!r:.80}")
        return cast("str | list[Any]", content)

    @override
    async def rollout_async(self, task: dict[str, Any], resources: NamedResources, rollout: Rollout) -> Any:
        """Run one task.

        Raises:
            ChatError: the model call failed.
            ValueError: no LLM is among the resources, the task has no question, or the grade is not a reward.
        """
        content = self.question(task)
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages += [{"role": "user", "content": content}] if isinstance(content, str) else content
        grade = self.grade(task, await answer_of("GradedAgent", messages, resources, rollout))
        reward: Any = await grade if inspect.isawaitable(grade) else grade
        if reward is None or are_dimensions(reward):
            return reward
        if (number := as_reward(reward)) is None:
            raise ValueError(f"grade returned {reward!r:.80}; expected {USABLE_REWARD}, a dict of them, or None")
        return number


async def answer_of(
    agent: str, messages: Sequence[Mapping[str, Any]], resources: NamedResources, rollout: Rollout
) -> str:
    """Return the text of the model's reply to the messages. `agent` is the name of the agent that asks.

    Raises:
        ChatError: the model call failed.
        ValueError: no LLM is among the resources.
    """
    llm = next((value for value in resources.values() if isinstance(value, LLM)), None)
    if llm is None:
        raise ValueError(f"{agent} needs an LLM among the resources; got {', '.join(resources) or 'none'}")
    if isinstance(llm, ProxyLLM):
        llm = llm.with_attempted_rollout(cast("AttemptedRollout", rollout))
    return (await Chat(llm).ask(messages, settings=llm.sampling_parameters)).text
