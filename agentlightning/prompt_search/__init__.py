"""What searches over prompts share: candidates, scores on tasks, what a critic sees, the history, the result."""
