"""The gateway between agents and model servers; every call becomes two spans of its attempt before it is answered.

Each name is imported on first use, since the imports load a web stack.
"""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
