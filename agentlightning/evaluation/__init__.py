"""Evaluation: scores of rollouts that are not trained, with intervals and a paired test."""
