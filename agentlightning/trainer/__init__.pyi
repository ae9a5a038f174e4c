from . import init_utils as init_utils, registry as registry, trainer as trainer
from agentlightning.trainer.init_utils import ComponentSpec as ComponentSpec, build_component as build_component
from agentlightning.trainer.registry import (
    AlgorithmRegistry as AlgorithmRegistry,
    ExecutionStrategyRegistry as ExecutionStrategyRegistry,
)
from agentlightning.trainer.trainer import Trainer as Trainer
