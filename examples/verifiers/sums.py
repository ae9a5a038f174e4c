"""An environment of verifiers: sums as tasks, and a harness that asks again until the reply contains a number."""
# pyright: basic, reportMissingImports=false
# The package is in a separate environment (constraints.txt), where its types are known.

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Ask", "Sums"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: Any) -> float:
        """Return 1.0 if the last number of the last reply is the answer."""
        return float(re.findall(r"\d+", trace.last_reply or "")[-1:] == [str(self.data.answer)])


class Sums(vf.Taskset[SumTask]):
    def load(self) -> Iterator[SumTask]:
        for number in range(100):
            a, b = 10 + number * 37 % 90, 10 + number * 53 % 90
            yield SumTask(SumData(prompt=f"What is {a} + {b}?", answer=a + b), self.config.task)


class Ask(vf.Harness[vf.HarnessConfig]):
    """Runs the conversation in this process. The harnesses of verifiers first download the packages of a program."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any):
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(3):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                text = reply.choices[0].message.content or ""
                if re.search(r"\d", text):
                    break
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Write the number."}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
