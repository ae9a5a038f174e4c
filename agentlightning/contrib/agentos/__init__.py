"""Support for Agent-OS and similar policy kernels in training: the actions that they refuse and record.

Written for `KernelSpace` of the package `agent-os-kernel`, which is not imported here and may be missing.
"""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
