"""`make bench-prompts`: what searches over prompts find, with a small model and with an agent that follows rules."""
