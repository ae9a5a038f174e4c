"""Spans on their way to an OTLP collector."""
