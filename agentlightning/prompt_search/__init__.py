"""The searches over prompts: beam search and GEPA, with the candidates, scores, critics and records that they share."""
