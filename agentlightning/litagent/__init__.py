"""Agents: the class that users subclass, and the decorators that make an agent of a function."""

from agentlightning.litagent.decorator import FunctionalLitAgent, llm_rollout, prompt_rollout, rollout
from agentlightning.litagent.litagent import LitAgent

__all__ = ["FunctionalLitAgent", "LitAgent", "llm_rollout", "prompt_rollout", "rollout"]
