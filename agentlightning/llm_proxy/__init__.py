"""The gateway between agents and model servers; every call becomes two spans of its attempt before it is answered."""

from agentlightning.llm_proxy.limits import GatewayLimits
from agentlightning.llm_proxy.models import ModelConfig
from agentlightning.llm_proxy.proxy import LLMProxy

__all__ = ["GatewayLimits", "LLMProxy", "ModelConfig"]
