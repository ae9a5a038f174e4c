"""Agents: functions, coroutines, classes; what they take and return."""

from typing import Any, TypedDict

import agentlightning as agl


class Task(TypedDict):
    question: str
    answer: str


@agl.rollout
def by_prompt(task: Task, prompt_template: agl.PromptTemplate) -> float:
    answer: str = prompt_template.format(question=task["question"])
    return float(answer == task["answer"])


@agl.rollout
async def by_model(task: Task, llm: agl.LLM) -> float:
    reveal_type(llm.endpoint)  # R: str
    return 0.5


@agl.llm_rollout
def with_llm(task: str, llm: agl.LLM) -> None:
    agl.emit_reward(1.0)


@agl.prompt_rollout
def with_prompt(task: str, prompt_template: agl.PromptTemplate) -> float | None:
    return None


class Greeter(agl.LitAgent[str]):
    def rollout(self, task: str, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        return 1.0 if rollout.mode == "val" else 0.0


class AsyncGreeter(agl.LitAgent[Task]):
    async def training_rollout_async(self, task: Task, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        return float(bool(task["answer"]))


def no_agent(task: str) -> str:
    return task


trainer = agl.Trainer(strategy="shm")
trainer.fit(by_prompt, train_dataset=[Task(question="1+1", answer="2")])
trainer.fit(by_model, train_dataset=[Task(question="1+1", answer="2")], val_dataset=[])
trainer.fit(Greeter(), train_dataset=["Ada"])
trainer.dev(AsyncGreeter(), train_dataset=[Task(question="", answer="")])
result = trainer.evaluate(with_prompt, ["Ada"])
reveal_type(result)  # R: EvaluationResult
reveal_type(result.mean_reward)  # R: float | None
calls: Any = [with_llm, no_agent]
trainer.fit(by_prompt, training_dataset=[])  # E
agl.rollout(1)  # E
by_prompt.no_such_method()  # E
