"""The Trainer: the one place that knows every part. Loaded on first use."""

from typing import TYPE_CHECKING, Any

from agentlightning.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from agentlightning.trainer.init_utils import ComponentSpec, build_component
    from agentlightning.trainer.registry import AlgorithmRegistry, ExecutionStrategyRegistry
    from agentlightning.trainer.trainer import Trainer

_HOMES: dict[str, str] = {
    "AlgorithmRegistry": "agentlightning.trainer.registry",
    "ComponentSpec": "agentlightning.trainer.init_utils",
    "ExecutionStrategyRegistry": "agentlightning.trainer.registry",
    "Trainer": "agentlightning.trainer.trainer",
    "build_component": "agentlightning.trainer.init_utils",
}

__all__ = ["AlgorithmRegistry", "ComponentSpec", "ExecutionStrategyRegistry", "Trainer", "build_component"]


def __getattr__(name: str) -> Any:
    return lazy_attributes(__name__, _HOMES, name)
