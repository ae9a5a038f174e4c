"""Agents: the class that users subclass, the decorators that make an agent of a function, and programs as agents."""

from agentlightning.litagent.command.agent import CommandAgent
from agentlightning.litagent.command.process import ProgramFailed, ProgramOutput, ProgramResultError, ProgramTimedOut
from agentlightning.litagent.decorator import FunctionalLitAgent, llm_rollout, prompt_rollout, rollout
from agentlightning.litagent.litagent import LitAgent

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
