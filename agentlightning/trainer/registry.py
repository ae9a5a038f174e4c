"""Short names of strategies and algorithms: plain dictionaries, to which a program may add its own."""

from __future__ import annotations

ExecutionStrategyRegistry: dict[str, str] = {
    "cs": "agentlightning.execution.client_server.ClientServerExecutionStrategy",
    "ray": "agentlightning.execution.ray.strategy.RayExecutionStrategy",
    "shm": "agentlightning.execution.shared_memory.SharedMemoryExecutionStrategy",
}
"""Short name to import path."""

AlgorithmRegistry: dict[str, str] = {
    "baseline": "agentlightning.algorithm.fast.Baseline",
    "grpo": "agentlightning.algorithm.grpo.grpo.GRPO",
}
"""Short name in lower case to import path; looked up in any case."""

ABSENT_ALGORITHMS: dict[str, str] = {
    "apo": "prompt optimisation is not part of this release; write it with @agl.algo",
    "ppo": "training with a critic is not part of this release; 'grpo' needs none",
    "verl": "training through VERL is not part of this release; 'grpo' trains with transformers",
}
"""Names that programs use and this release does not have, with what to do instead."""
