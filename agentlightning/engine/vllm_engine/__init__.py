"""vLLM as the engine that serves the policy: a process of its own, to which the learner gives its weights."""
