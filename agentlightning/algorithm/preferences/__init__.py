"""Preference pairs out of the rollouts of a store, for trainers that learn from what was better and what was worse."""
