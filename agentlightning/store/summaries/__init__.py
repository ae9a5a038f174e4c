"""Summaries of rollouts for all stores: facts of records for searching, pages of summaries, and statistics."""
