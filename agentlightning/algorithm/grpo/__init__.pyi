from agentlightning.algorithm.grpo.grpo import GRPO as GRPO, GRPOResult as GRPOResult
from agentlightning.algorithm.grpo.settings import GRPOSettings as GRPOSettings
