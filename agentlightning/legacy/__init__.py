"""The v0.1 protocol, for scripts that still use it: a server that distributes tasks, a client, and a runner.

Nothing else in this package uses it. All of it is deprecated and warns once. Use a `Trainer` with a store instead,
which also keeps results durably and records traces. `agentlightning.client`, `agentlightning.server` and
`agentlightning.runner.legacy` are the old import paths.
"""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
