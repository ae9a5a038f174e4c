"""Agents: the class that users subclass, the decorators that make an agent of a function, and programs as agents."""

from agentlightning.litagent.command import CommandAgent
from agentlightning.litagent.decorator import FunctionalLitAgent, llm_rollout, prompt_rollout, rollout
from agentlightning.litagent.litagent import LitAgent
from agentlightning.litagent.program import ProgramFailed, ProgramOutput, ProgramResultError, ProgramTimedOut

__all__ = [
    "CommandAgent",
    "FunctionalLitAgent",
    "LitAgent",
    "ProgramFailed",
    "ProgramOutput",
    "ProgramResultError",
    "ProgramTimedOut",
    "llm_rollout",
    "prompt_rollout",
    "rollout",
]
