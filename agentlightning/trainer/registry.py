"""Short names of strategies, algorithms and other parts: dictionaries that a program may extend, and their look-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

Registry: TypeAlias = Mapping[str, Any]
"""Short names to import paths (or to classes)."""

ExecutionStrategyRegistry: dict[str, str] = {
    "cs": "agentlightning.execution.client_server.ClientServerExecutionStrategy",
    "ray": "agentlightning.execution.ray.strategy.RayExecutionStrategy",
    "shm": "agentlightning.execution.shared_memory.SharedMemoryExecutionStrategy",
}
"""Short name to import path."""

AlgorithmRegistry: dict[str, str] = {
    "apo": "agentlightning.algorithm.apo.apo.APO",
    "baseline": "agentlightning.algorithm.fast.Baseline",
    "gepa": "agentlightning.algorithm.gepa.GEPA",
    "grpo": "agentlightning.algorithm.grpo.GRPO",
    "ppo": "agentlightning.algorithm.ppo.PPO",
    "sft": "agentlightning.algorithm.sft.SFT",
    "tinker": "agentlightning.algorithm.tinker.Tinker",
    "trl": "agentlightning.algorithm.trl.TRL",
    "verl": "agentlightning.algorithm.verl.VERL",
}
"""Short name in lower case to import path; looked up in any case."""

NEEDED_BY: dict[str, tuple[str, ...]] = {
    "agentlightning.algorithm.grpo.GRPO": ("model",),
    "agentlightning.algorithm.ppo.PPO": ("model",),
    "agentlightning.algorithm.sft.SFT": ("model",),
    "agentlightning.algorithm.tinker.Tinker": ("model",),
}
"""Required settings by import path. A missing one is reported before the training stack loads, which takes seconds."""

TrackerRegistry: dict[str, str] = {
    "mlflow": "agentlightning.trackers.mlflow_tracker.MLflowTracker",
    "swanlab": "agentlightning.trackers.swanlab_tracker.SwanLabTracker",
    "tensorboard": "agentlightning.trackers.tensorboard_tracker.TensorBoardTracker",
    "wandb": "agentlightning.trackers.wandb_tracker.WandbTracker",
}
"""Short name in lower case to import path."""


def short_name(spec: Any) -> str | None:
    """Return the name in a spec, in lower case; None if it has none."""
    if isinstance(spec, dict):
        settings = cast("dict[str, Any]", spec)
        spec = settings.get("type", settings.get("name"))
    return spec.lower() if isinstance(spec, str) else None


def registered(name: str, registry: Registry | None) -> Any:
    """Return the entry of a short name, as written or in lower case, or None."""
    return (registry or {}).get(name, (registry or {}).get(name.lower()))


def known_names(registry: Registry | None) -> str:
    """Return the short names as the end of a list in an error message; empty without short names."""
    return f" or one of {', '.join(map(repr, sorted(registry)))}" if registry else ""
