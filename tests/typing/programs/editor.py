"""A program that is being typed: `test_programs.py` asks an editor about it."""

import agentlightning as agl

agl.GRPO(model="m", learning_rate=1e-5)
settings = agl.GRPO(model="m").settings
print(settings.learning_rate, settings.step_timeout_seconds, settings.max_completion_length)
print(agl.Rollout.model_fields, agl.Trainer(n_runners=2).fit, agl.InMemoryLightningStore().enqueue_rollout)
