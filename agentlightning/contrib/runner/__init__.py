"""Runners for other projects' agents."""
