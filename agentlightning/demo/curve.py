"""The picture of a run: mean reward of each step and accuracy on held-out tasks."""

from __future__ import annotations

from pathlib import Path

from agentlightning.algorithm.grpo.grpo import GRPOResult


def draw_curve(result: GRPOResult, path: Path) -> None:
    """Write the curve as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    rewards = [(m.step, m.mean_reward) for m in result.metrics if m.mean_reward is not None]
    axes.plot([s for s, _ in rewards], [r for _, r in rewards], color="tab:blue", label="mean reward of the step")
    for sampling, color in (("sampled", "tab:orange"), ("greedy", "tab:green")):
        points = [(e.step, e.accuracy) for e in result.evaluations if e.sampling == sampling]
        if points:
            label = f"held-out accuracy, {sampling}"
            axes.plot([s for s, _ in points], [a for _, a in points], "o--", color=color, label=label)
    axes.set(xlabel="training step", ylabel="reward / share of tasks solved", ylim=(0, 1.02), xlim=(0, None))
    axes.set_title("What the agent learned")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)
