"""Prompt searches: beam search and GEPA, with their common candidates, scores, critics and records."""
