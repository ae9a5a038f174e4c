"""The report at the end of the demo: before and after on the same tasks, a test, a verdict, two conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentlightning.algorithm.evaluate import Comparison, compare
from agentlightning.algorithm.grpo.evaluation import Evaluation
from agentlightning.algorithm.grpo.grpo import GRPOResult
from agentlightning.store.base import LightningStore
from agentlightning.types import Span
from agentlightning.utils.otel import filter_and_unflatten_attributes


def verdict(result: GRPOResult) -> Comparison:
    """Compare the last sampled evaluation with the first, task by task."""
    before, after = result.evaluation("sampled", last=False), result.evaluation("sampled", last=True)
    assert before is not None
    assert after is not None
    return compare(before.solved, after.solved)


def report_lines(result: GRPOResult, comparison: Comparison) -> list[str]:
    """Return the figures of the report, line by line."""
    lines = ["", f"held-out tasks: {len(_one(result, 'sampled', False).rewards)}, the same before and after"]
    lines.append(f"{'':22}{'before':>9}{'after':>9}")
    for sampling in ("sampled", "greedy"):
        before, after = _one(result, sampling, False), _one(result, sampling, True)
        lines.append(f"  {'solved, ' + sampling:20}{before.accuracy:>9.1%}{after.accuracy:>9.1%}")
    lines.append(
        f"  {comparison.gained} tasks gained, {comparison.lost} lost; "
        f"exact McNemar test, two-sided: p = {comparison.p_value:.2g}"
    )
    lines.append(f"  {result.steps} updates of the weights in {result.train_seconds:.1f} s of training")
    lines.append(f"verdict: {comparison.verdict}")
    return lines


def _one(result: GRPOResult, sampling: str, last: bool) -> Evaluation:
    found = result.evaluation(sampling, last=last)
    assert found is not None, sampling
    return found


async def conversations(store: LightningStore, result: GRPOResult, comparison: Comparison) -> list[str]:
    """Return two conversations on one task, before and after; a task that was gained if there is one."""
    before, after = _one(result, "sampled", False), _one(result, "sampled", True)
    pairs = list(zip(before.solved, after.solved, strict=True))
    index = next((i for i, pair in enumerate(pairs) if pair == (False, True)), 0)
    lines: list[str] = []
    for name, evaluation in (("before", before), ("after", after)):
        spans = await store.query_spans(evaluation.rollout_ids[index], "latest")
        reward = evaluation.rewards[index]
        lines += ["", f"--- a conversation {name} training (reward {'none' if reward is None else f'{reward:g}'}) ---"]
        lines += conversation_lines(list(spans))
    return lines


def conversation_lines(spans: Sequence[Span]) -> list[str]:
    """Return the messages of an attempt as its model calls saw them, in order, each once."""
    calls = [span for span in spans if span.name == "litellm_request"]
    if not calls:
        return ["(no model call)"]
    last = calls[-1]
    messages = [*_messages(last, "gen_ai.prompt"), *_messages(last, "gen_ai.completion")]
    return [f"  {message.get('role', '?'):>9}: {_text(message)}" for message in messages]


def _messages(span: Span, prefix: str) -> list[dict[str, Any]]:
    found: Any = filter_and_unflatten_attributes(span.attributes, prefix)
    return [message for message in found if isinstance(message, dict)] if isinstance(found, list) else []


def _text(message: dict[str, Any]) -> str:
    parts = [str(message["content"])] if message.get("content") else []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        parts.append(f"calls {function.get('name')}({_arguments(function.get('arguments'))})")
    if "function_call" in message:
        function = message["function_call"]
        parts.append(f"calls {function.get('name')}({_arguments(function.get('arguments'))})")
    return " ".join(parts) or "(says nothing)"


def _arguments(text: Any) -> str:
    try:
        values = json.loads(text)
    except (TypeError, ValueError):
        return str(text)
    return ", ".join(f"{name}={value!r}" for name, value in values.items()) if isinstance(values, dict) else str(values)
