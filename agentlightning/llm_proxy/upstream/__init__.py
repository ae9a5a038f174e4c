"""Requests to model servers and their responses."""
