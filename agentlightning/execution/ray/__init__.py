"""Runners as Ray actors."""
