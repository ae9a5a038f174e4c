"""The gateway between agents and model servers; every call is recorded as two spans before the agent gets the reply.

Each name is imported on first use, since the imports load a web stack.
"""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
