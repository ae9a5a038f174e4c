"""`LLM` and `ProxyLLM`, for programs that import them from here. They are the same classes as in `agentlightning`."""

from agentlightning.types import LLM as LLM
from agentlightning.types import ProxyLLM as ProxyLLM

__all__ = ["LLM", "ProxyLLM"]
