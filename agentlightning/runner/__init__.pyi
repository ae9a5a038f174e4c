from . import agent as agent, base as base, legacy as legacy
from agentlightning.legacy.runner import LegacyAgentRunner as LegacyAgentRunner
from agentlightning.runner.agent import LitAgentRunner as LitAgentRunner
from agentlightning.runner.base import Runner as Runner
