"""OTLP, OpenTelemetry's wire format: bytes of a request to spans and back, and the HTTP side that any signal shares.

Nothing here knows a store. The HTTP side (`http.py`) needs Starlette. Each name is imported on first use.
"""

from agentlightning.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
