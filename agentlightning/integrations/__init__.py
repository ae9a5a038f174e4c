"""Models of frameworks that need more than a base URL, a key and a model's name, in one call each.

One module per framework, named after its package, and nothing of it is imported before the call. A function takes the
`llm` that the agent was given and returns the framework's own object, set up so that every call reaches the gateway:
no cache in the client, the dialect that keeps thoughts. The guides are in docs/how-to/frameworks.
"""

from agentlightning.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
