"""Agent-OS, and policy kernels like it, beside training: what they refuse, and what they record of an agent's actions.

Made for `KernelSpace` of the package `agent-os-kernel`, which needs not be installed: nothing of it is imported here.
"""

from agentlightning.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
