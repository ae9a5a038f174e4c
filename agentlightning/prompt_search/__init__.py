"""The searches over prompts: beam search and GEPA, with their common candidates, scores, critics and records."""
