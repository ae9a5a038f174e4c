from . import (
    access as access,
    batch as batch,
    calls as calls,
    dialects as dialects,
    endpoints as endpoints,
    forwarding as forwarding,
    gateway as gateway,
    off_loop as off_loop,
    policies as policies,
    proxy as proxy,
    recording as recording,
    replies as replies,
    responses_state as responses_state,
    sse as sse,
    upstream as upstream,
    weights as weights,
)
from agentlightning.llm_proxy.access.limits import GatewayLimits as GatewayLimits
from agentlightning.llm_proxy.endpoints.balancer import HealthChecks as HealthChecks
from agentlightning.llm_proxy.endpoints.models import ModelConfig as ModelConfig
from agentlightning.llm_proxy.policies import PolicyConfig as PolicyConfig
from agentlightning.llm_proxy.proxy import LLMProxy as LLMProxy
