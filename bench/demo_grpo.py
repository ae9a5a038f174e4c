"""GRPO with the settings of the demo."""

from __future__ import annotations

from typing import Any

import agentlightning as agl
from agentlightning.demo import settings


def demo_grpo(**own: Any) -> agl.GRPO:
    """Return the demo's algorithm, without output, with changed settings."""
    shared: dict[str, Any] = {
        "num_generations": settings.NUM_GENERATIONS,
        "batch_size": settings.BATCH_SIZE,
        "learning_rate": settings.LEARNING_RATE,
        "num_iterations": settings.NUM_ITERATIONS,
        "epsilon": settings.EPSILON,
        "epsilon_high": settings.EPSILON_HIGH,
        "max_completion_length": settings.MAX_COMPLETION_LENGTH,
        "progress": "none",
    }
    return agl.GRPO(**{**shared, **own})
