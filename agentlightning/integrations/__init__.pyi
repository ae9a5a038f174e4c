from agentlightning.integrations.dspy import dspy_lm as dspy_lm
