"""Summaries of rollouts, on every store: facts of records for searching, pages of summaries, figures over many."""
