"""Evaluation: rollouts that are scored and not trained, with intervals and a paired test."""
