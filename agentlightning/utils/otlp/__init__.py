"""OTLP, OpenTelemetry's wire format: conversion of requests to spans and back, and the HTTP side shared by all signals.

Nothing here depends on a store. The HTTP side (`http.py`) needs Starlette. Each name is imported on first use.
"""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
