from agentlightning.training.chosen.sft_settings import SFTSettings as SFTSettings
from agentlightning.algorithm.sft.sft import SFT as SFT
