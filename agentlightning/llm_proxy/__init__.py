"""The gateway between agents and model servers; every call becomes two spans of its attempt before it is answered."""

from agentlightning.llm_proxy.access.limits import GatewayLimits
from agentlightning.llm_proxy.endpoints.balancer import HealthChecks
from agentlightning.llm_proxy.endpoints.models import ModelConfig
from agentlightning.llm_proxy.policies import PolicyConfig
from agentlightning.llm_proxy.proxy import LLMProxy

__all__ = ["GatewayLimits", "HealthChecks", "LLMProxy", "ModelConfig", "PolicyConfig"]
