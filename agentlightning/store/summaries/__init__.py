"""Rollouts in short, on every store: what of a record is kept to find it by, pages of summaries, figures over many."""
