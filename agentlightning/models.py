"""`LLM` and `ProxyLLM` in a module of their own; the same classes as in `agentlightning`."""

from agentlightning.types import LLM as LLM
from agentlightning.types import ProxyLLM as ProxyLLM

__all__ = ["LLM", "ProxyLLM"]
