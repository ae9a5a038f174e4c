"""PPO: proximal policy optimisation with a value head on the policy, by the loop of GRPO."""

from agentlightning.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
