"""Reward functions out of other projects' verdicts."""
