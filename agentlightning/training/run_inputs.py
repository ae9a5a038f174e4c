"""The inputs of a run, and their checks: tasks, model, device, time limit, adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentlightning.adapter import TracerTraceToTriplet, TraceToTripletBase
from agentlightning.adapter.base import TraceAdapter
from agentlightning.base.terminal import counted
from agentlightning.errors import BadRequestError
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.base import LightningStore
from agentlightning.training.records import RunLog
from agentlightning.types import NamedResources, RolloutConfig

if TYPE_CHECKING:
    from agentlightning.training.settings import TrainingSettings


class RunSource(Protocol):
    """The algorithm of a run, with the components that the Trainer assigned to it."""

    def get_store(self) -> LightningStore: ...
    def get_run_log(self) -> RunLog: ...
    def get_adapter(self) -> TraceAdapter[Any]: ...
    def get_llm_proxy(self) -> LLMProxy | None: ...
    def get_initial_resources(self) -> NamedResources | None: ...
    def get_rollout_config(self) -> RolloutConfig | None: ...


def check_model(model: str) -> None:
    """Raise BadRequestError for a model that is neither a folder nor in the local cache, which transformers would
    download."""
    from huggingface_hub import try_to_load_from_cache

    if Path(model).is_dir():
        return
    try:
        config = try_to_load_from_cache(model, "config.json")
    except ValueError:  # it cannot be the name of a model
        config = None
    if not isinstance(config, str):
        raise BadRequestError(
            f"model={model!r} is neither a folder nor the name of a model in the local cache. Pass the folder of a "
            "model, or download it first (hf download NAME); a run downloads nothing"
        )


def check_device(device: str) -> None:
    """Raise BadRequestError, with the available devices, for a device that torch does not know or cannot use."""
    import torch

    try:
        if torch.empty(1, device=device).is_meta:
            raise RuntimeError("its tensors have no data")
    except (RuntimeError, AssertionError) as error:  # the latter from a torch built without CUDA
        devices = ", ".join(["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))])
        why = str(error).partition("\n")[0]
        raise BadRequestError(
            f"device={device!r} cannot be used: {why}. torch {torch.__version__} sees these devices: {devices}"
        ) from None


def check_one_time_limit(name: str, own: float | None, config: RolloutConfig) -> None:
    """Raise BadRequestError if the algorithm's `rollout_timeout_seconds` (`own`) and the Trainer's limit differ."""
    if None not in (own, config.timeout_seconds) and own != config.timeout_seconds:
        raise BadRequestError(
            f"rollout_timeout_seconds={own} of {name} and rollout_config timeout_seconds={config.timeout_seconds} of "
            "the Trainer set the same limit but differ. Remove one of them"
        )


def triplet_adapter(algorithm: RunSource) -> TraceToTripletBase:
    """Return the adapter of a run; the default reads the spans of the tracer and the gateway.

    Raises:
        BadRequestError: the adapter returns no triplets.
    """
    try:
        adapter = algorithm.get_adapter()
    except ValueError:
        return TracerTraceToTriplet()
    if not isinstance(adapter, TraceToTripletBase):
        raise BadRequestError(
            f"{type(algorithm).__name__} trains on triplets, but the adapter {type(adapter).__name__} returns none. "
            "Use TracerTraceToTriplet (the default) or LlmProxyTraceToTriplet"
        )
    return adapter


def check_tasks(name: str, settings: TrainingSettings, tasks: Sequence[object], held_out: Sequence[object]) -> None:
    """Raise BadRequestError if there are no tasks, evaluations are scheduled without held-out tasks, a curriculum
    cannot choose, because a step has all tasks, or the schedule of the learning rate refuses its arguments."""
    for own in settings.by_policy().values():
        for step in (1, own.max_steps):
            own.learning_rate_at(step)
    if not tasks:
        raise BadRequestError(f"{name} needs tasks: pass train_dataset to fit, with at least one task")
    if settings.eval_steps and not held_out:
        raise BadRequestError(
            f"eval_steps={settings.eval_steps} has no effect without held-out tasks: pass val_dataset to fit, or omit "
            "eval_steps"
        )
    if settings.draws_by_solve_rate and settings.batch_size >= len(tasks):
        raise BadRequestError(
            f"curriculum has no effect with batch_size={settings.batch_size} and {counted(len(tasks), 'task')}: every "
            "step has all tasks. Reduce batch_size, or omit curriculum"
        )
