"""SFT: supervised fine-tuning on chosen rollouts, by the loop of GRPO."""

from agentlightning.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
