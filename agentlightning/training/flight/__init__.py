"""Asynchronous collection: groups of rollouts that stay in flight while the weights change (arXiv:2505.24298)."""
