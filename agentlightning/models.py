"""`LLM` and `ProxyLLM` under the name of a module of its own; the same classes as in `agentlightning`."""

from agentlightning.types import LLM as LLM
from agentlightning.types import ProxyLLM as ProxyLLM

__all__ = ["LLM", "ProxyLLM"]
