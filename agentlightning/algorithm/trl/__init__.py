"""TRL: GRPO by the `GRPOTrainer` of the package `trl`, on rollouts of the store."""

from agentlightning.algorithm.trl.trl import TRL as TRL
