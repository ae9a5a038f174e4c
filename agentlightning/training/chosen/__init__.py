"""Supervised fine-tuning within the learning loop: rollouts are chosen, and their tokens are what is to be said."""
