"""Tinker: GRPO on the machines of the Tinker service, on rollouts of the store."""

from agentlightning.algorithm.tinker.tinker import Tinker as Tinker
