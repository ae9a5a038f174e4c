from agentlightning.algorithm.grpo.grpo import GRPO as GRPO, GRPOResult as GRPOResult
from agentlightning.training.settings import GRPOSettings as GRPOSettings
