"""The demo's final report: accuracy before and after on the same tasks, a test, two conversations and a curve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from agentlightning.adapter.messages import Message, TraceToMessages
from agentlightning.evaluation.paired import PairedComparison, compare_rewards
from agentlightning.store.base import LightningStore
from agentlightning.training.result import Evaluation, GRPOResult
from agentlightning.types import Span


def verdict(result: GRPOResult) -> PairedComparison:
    """Compare the last sampled evaluation with the first, task by task."""
    before, after = evaluation_of(result, "sampled", False), evaluation_of(result, "sampled", True)
    return compare_rewards(before.solved or [], after.solved or [])


def report_lines(result: GRPOResult, comparison: PairedComparison) -> list[str]:
    """Return the lines of the report with the metrics."""
    lines = ["", f"held-out tasks: {len(evaluation_of(result, 'sampled', False).rewards)}, same tasks before and after"]
    lines.append(f"{'':22}{'before':>9}{'after':>9}")
    for sampling in ("sampled", "greedy"):
        before, after = evaluation_of(result, sampling, False), evaluation_of(result, sampling, True)
        lines.append(f"  {'solved, ' + sampling:20}{before.accuracy or 0.0:>9.1%}{after.accuracy or 0.0:>9.1%}")
    lines.append(
        f"  {comparison.gained} tasks gained, {comparison.lost} lost; "
        f"p = {comparison.p_value:.2g} ({comparison.method})"
    )
    lines.append(f"  {result.steps} weight updates in {result.train_seconds:.1f} s of training")
    lines.append(f"verdict: {comparison.verdict}")
    return lines


def evaluation_of(result: GRPOResult, sampling: str, last: bool) -> Evaluation:
    """Return the first or the last evaluation with a sampling method."""
    evaluation = result.evaluation(sampling, last=last)
    assert evaluation is not None, sampling
    return evaluation


async def conversations(store: LightningStore, result: GRPOResult, comparison: PairedComparison) -> list[str]:
    """Return two conversations on one task, before and after training. The task is a gained one, if possible."""
    before, after = evaluation_of(result, "sampled", False), evaluation_of(result, "sampled", True)
    pairs = list(zip(before.solved or [], after.solved or [], strict=True))
    index = next((i for i, pair in enumerate(pairs) if pair == (False, True)), 0)
    lines: list[str] = []
    for name, evaluation in (("before", before), ("after", after)):
        spans = await store.query_spans(evaluation.rollout_ids[index], "latest")
        reward = evaluation.rewards[index]
        lines += ["", f"--- a conversation {name} training (reward {'none' if reward is None else f'{reward:g}'}) ---"]
        lines += conversation_lines(list(spans))
    return lines


def conversation_lines(spans: Sequence[Span]) -> list[str]:
    """Return the messages of an attempt's last model call, including the reply."""
    calls = TraceToMessages().adapt(spans)
    if not calls:
        return ["(no model call)"]
    return [f"  {message.get('role', '?'):>9}: {_text(message)}" for message in calls[-1]["messages"]]


def _text(message: Message) -> str:
    parts = [str(message["content"])] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(f"calls {function['name']}({_arguments(function['arguments'])})")
    return " ".join(parts) or "(says nothing)"


def _arguments(text: str) -> str:
    try:
        values: object = json.loads(text)
    except (TypeError, ValueError):
        return text
    if not isinstance(values, dict):
        return str(values)
    return ", ".join(f"{name}={value!r}" for name, value in cast("dict[str, Any]", values).items())


def draw_curve(result: GRPOResult, path: Path) -> None:
    """Write a PNG with the mean reward of each step and the accuracy on held-out tasks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    rewards = [(m.step, m.mean_reward) for m in result.metrics if m.mean_reward is not None]
    axes.plot([s for s, _ in rewards], [r for _, r in rewards], color="tab:blue", label="mean reward of the step")
    for sampling, color in (("sampled", "tab:orange"), ("greedy", "tab:green")):
        points = [(e.step, e.accuracy or 0.0) for e in result.evaluations if e.sampling == sampling]
        if points:
            label = f"held-out accuracy, {sampling}"
            axes.plot([s for s, _ in points], [a for _, a in points], "o--", color=color, label=label)
    axes.set(xlabel="training step", ylabel="reward / share of solved tasks", ylim=(0, 1.02), xlim=(0, None))
    axes.set_title("Reward and held-out accuracy by step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)
