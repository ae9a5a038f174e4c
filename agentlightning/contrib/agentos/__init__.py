"""Support for Agent-OS and similar policy kernels in training: the actions that they refuse, and those that they
record.

Written for `KernelSpace` of the package `agent-os-kernel`, which does not need to be installed: it is not imported
here.
"""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
