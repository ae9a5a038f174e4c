"""Models of frameworks that need more than a base URL, a key and a model's name, one function each.

One module per framework, named after its package, which is imported by the call only. A function takes the
`llm` of the agent and returns the framework's own object, configured so that every call reaches the gateway:
no cache in the client, the dialect that keeps thoughts. The guides are in docs/how-to/frameworks.
"""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
