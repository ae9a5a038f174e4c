"""Models for frameworks that need more than a base URL, a key and a model's name; one function per framework.

Each module is named after the framework's package, which is imported only by the call. The function takes the
`llm` of the agent and returns an object of the framework that sends every call to the gateway: without a client
cache, and with the dialect that keeps thoughts. The guides are in docs/how-to/frameworks.
"""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
