"""The policies of a GRPO run: one for most, several where agents of one rollout learn each on its own calls."""
