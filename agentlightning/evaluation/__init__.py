"""Evaluation: scores of rollouts without training, with confidence intervals and a paired test."""
