"""Two prompts evaluated on the same tasks by an agent whose conversations are recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opentelemetry import trace

import agentlightning as agl
from agentlightning.evaluation.result import EvaluationResult

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> \u202eevil\u0000 {{ 7 * 7 }}"
SECRET = "correct-horse-battery"


def agent(task: dict[str, Any], prompt: agl.PromptTemplate) -> None:
    """Right where the prompt names the level; says what pages must not obey, and what nobody may read."""
    right = (task["level"] in prompt.template and task["n"] % 10 != 0) or (task["n"] == 1 and prompt.template == "easy")
    with trace.get_tracer("agent").start_as_current_span("openai.chat.completion") as span:
        messages = ("user", f"{task['n']}: {HOSTILE}"), ("assistant", f"my key is {SECRET}")
        for place, (role, text) in enumerate(messages[:1]):
            span.set_attributes({f"gen_ai.prompt.{place}.role": role, f"gen_ai.prompt.{place}.content": text})
        answer = {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": messages[1][1]}
        span.set_attributes({**answer, "gen_ai.usage.prompt_tokens": 5, "gen_ai.usage.completion_tokens": 7})
    agl.emit_reward({"right": float(right), "short": 1.0 - task["n"] / 100}, primary_key="right")


def tasks_of_levels(count: int) -> list[dict[str, Any]]:
    """Tasks of three levels in turn."""
    return [{"n": n, "level": ("easy", "hard", "odd")[n % 3], "note": HOSTILE} for n in range(count)]


def evaluated(place: str | Path, prompt: str, tasks: int = 40, **settings: Any) -> EvaluationResult:
    """Evaluate a prompt in a store file, as a program of a user's."""
    resources: Any = {"prompt": agl.PromptTemplate(template=prompt, engine="f-string")}
    trainer = agl.Trainer(
        store=agl.SQLiteLightningStore(place, synchronous="NORMAL"), strategy="shm", runner={"concurrency": 4}
    )
    return trainer.evaluate(agent, tasks_of_levels(tasks), resources=resources, slices="level", **settings)
