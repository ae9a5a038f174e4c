from . import (
    apo as apo,
    base as base,
    decorator as decorator,
    fast as fast,
    grpo as grpo,
    ppo as ppo,
    sft as sft,
    utils as utils,
)
from agentlightning.algorithm.apo import APO as APO
from agentlightning.algorithm.gepa import GEPA as GEPA
from agentlightning.algorithm.base import Algorithm as Algorithm
from agentlightning.algorithm.decorator import FunctionalAlgorithm as FunctionalAlgorithm, algo as algo
from agentlightning.algorithm.fast import Baseline as Baseline, FastAlgorithm as FastAlgorithm
from agentlightning.algorithm.grpo import GRPO as GRPO
from agentlightning.algorithm.ppo import PPO as PPO
from agentlightning.algorithm.sft import SFT as SFT
from agentlightning.algorithm.tinker import Tinker as Tinker
from agentlightning.algorithm.trl import TRL as TRL
from agentlightning.algorithm.verl import VERL as VERL
from agentlightning.training.ppo_settings import PPOSettings as PPOSettings
from agentlightning.training.result import GRPOResult as GRPOResult
from agentlightning.training.settings import GRPOSettings as GRPOSettings
from agentlightning.training.sft_settings import SFTSettings as SFTSettings
