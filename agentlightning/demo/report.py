"""The demo's final report: accuracy before and after on the same tasks, a test, two conversations and a curve."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from agentlightning.adapter.messages import Message, TraceToMessages
from agentlightning.base.terminal import counted
from agentlightning.evaluation.paired import PairedComparison, compare_rewards
from agentlightning.store.base import LightningStore
from agentlightning.training.result import Evaluation, GRPOResult


def verdict(result: GRPOResult, sampling: str = "sampled") -> PairedComparison:
    """Compare the last evaluation with the first, task by task."""
    before, after = evaluation_of(result, sampling, False), evaluation_of(result, sampling, True)
    return compare_rewards(before.solved or [], after.solved or [])


def report_lines(result: GRPOResult, comparison: PairedComparison) -> list[str]:
    """Return the lines of the report with the metrics."""
    lines = ["", f"held-out tasks: {len(evaluation_of(result, 'sampled', False).rewards)}, same tasks before and after"]
    lines.append(f"{'':22}{'before':>9}{'after':>9}")
    for sampling in ("sampled", "greedy"):
        before, after = evaluation_of(result, sampling, False), evaluation_of(result, sampling, True)
        shares = f"{before.accuracy or 0.0:>9.1%}{after.accuracy or 0.0:>9.1%}"
        lines.append(f"  {'solved, ' + sampling:20}{shares}  {verdict(result, sampling)}")
    lines.append(f"  {counted(result.steps, 'weight update')} in {result.train_seconds:.1f} s of training")
    lines.append(f"verdict: {comparison.verdict}")
    return lines


def evaluation_of(result: GRPOResult, sampling: str, last: bool) -> Evaluation:
    """Return the first or the last evaluation with a sampling method."""
    evaluation = result.evaluation(sampling, last=last)
    assert evaluation is not None, sampling
    return evaluation


async def conversations(store: LightningStore, result: GRPOResult) -> list[str]:
    """Return two greedy conversations on one task, before and after training: on a gained task with the habit before,
    if there is one."""
    before, after = evaluation_of(result, "greedy", False), evaluation_of(result, "greedy", True)
    pairs = zip(before.solved or [], after.solved or [], strict=True)
    gained = [index for index, pair in enumerate(pairs) if pair == (False, True)]
    for index in gained:
        if shows_habit(messages := await _messages(store, before, index)):
            lines = list[str]()
            break
    else:
        index = gained[0] if gained else 0
        lines = ["", "no task that training gained shows the wrong habit in well-formed text before training"]
        messages = await _messages(store, before, index)
    for name, evaluation in (("before", before), ("after", after)):
        reward = evaluation.rewards[index]
        score = "none" if reward is None else f"{reward:g}"
        lines += ["", f"--- a conversation {name} training (greedy, reward {score}) ---"]
        messages = messages if evaluation is before else await _messages(store, after, index)
        lines += [f"  {each.get('role', '?'):>9}: {_text(each)}" for each in messages] or ["(no model call)"]
    return lines


async def _messages(store: LightningStore, evaluation: Evaluation, index: int) -> Sequence[Message]:
    """Return the messages of a rollout's last model call, including the reply."""
    calls = TraceToMessages().adapt(list(await store.query_spans(evaluation.rollout_ids[index], "latest")))
    return calls[-1]["messages"] if calls else []


def shows_habit(messages: Sequence[Message]) -> bool:
    """Return whether the only reply is a number of the question, without the calculator."""
    if len(messages) != 2 or messages[1].get("tool_calls"):
        return False
    return str(messages[1].get("content")).strip() in re.findall(r"\d+", str(messages[0].get("content")))


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
