"""An agent whose tasks are samples of Inspect and whose reward is an Inspect scorer."""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

import openai
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target, value_to_float
from inspect_ai.solver import TaskState
from sums import HELD_OUT_SEED, HELD_OUT_SIZE, last_number, samples

import agentlightning as agl


def tasks(size: int, seed: int) -> list[dict[str, str]]:
    """Return samples as tasks, which are plain data, without those of the evaluation."""
    held_out = {sample.input for sample in samples(HELD_OUT_SIZE, HELD_OUT_SEED)}
    chosen = [sample for sample in samples(size, seed) if sample.input not in held_out]
    return [{"question": str(sample.input), "answer": str(sample.target)} for sample in chosen]


@agl.rollout
async def answers(task: dict[str, str], llm: agl.LLM) -> float:
    """Ask the question and return the score of the reply."""
    async with openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key or "unused") as client:
        reply = await client.chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": task["question"]}],
            **llm.sampling_parameters,
        )
    output = ModelOutput.from_content(llm.model, reply.choices[0].message.content or "")
    state = TaskState(model=llm.model, sample_id=0, epoch=1, input=task["question"], messages=[], output=output)
    score = await last_number()(state, Target(task["answer"]))
    return value_to_float()(score.value)
