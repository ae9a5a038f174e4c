"""`PromptTemplate` in a module of its own; the same class as `agentlightning.PromptTemplate`."""

from agentlightning.types import PromptTemplate as PromptTemplate

__all__ = ["PromptTemplate"]
