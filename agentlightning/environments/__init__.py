"""Tasks and rewards of other projects, as data sets and agents. Each function needs the package of its project."""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
