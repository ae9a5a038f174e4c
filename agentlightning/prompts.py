"""`PromptTemplate`, for programs that import it from here. It is the same class as `agentlightning.PromptTemplate`."""

from agentlightning.types import PromptTemplate as PromptTemplate

__all__ = ["PromptTemplate"]
