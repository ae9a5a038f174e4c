"""Prompt templates: f-strings and jinja, both without access to Python objects."""
