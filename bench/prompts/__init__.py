"""`make bench-prompts`: results of searches over prompts, with a small model and with an agent that follows rules."""
