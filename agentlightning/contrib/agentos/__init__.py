"""Agent-OS, and similar policy kernels, in training: the actions that they refuse, and those that they record.

Made for `KernelSpace` of the package `agent-os-kernel`, which need not be installed: nothing of it is imported here.
"""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
