"""torch and transformers in this process: imported or named as missing, their threads, kernels, memory and output.

`grpo.py` imports this module before every other one that needs torch.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from agentlightning.errors import MissingExtraError

try:
    import torch
    from transformers.utils import logging as transformers_logging
except ModuleNotFoundError as error:
    raise MissingExtraError("agl.GRPO", "grpo", error.name or "torch") from error

SMALL_MODEL_PARAMETERS: Final = 10_000_000
_OUT_OF_MEMORY: Final = (
    *("DefaultCPUAllocator", "std::bad_alloc"),
    *("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)


@contextmanager
def one_thread() -> Generator[None]:
    """Let torch compute in the calling thread alone.

    The operations of a small model are too short to share: a second thread wins nothing on idle cores, and on busy ones
    each operation waits for it (the warm start of the demo took 50 s with one thread and 140 s with two, beside one
    other process on two cores).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def leave_out_cudnn_attention(device: torch.device) -> None:
    """On a GPU, keep this process from cuDNN's attention, which makes a plan for each shape that it has not met.

    Every generated token has a new shape, and so have most rows; a plan takes up to a second (pytorch pull request
    155958). The other kernels need none.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def no_progress_bar() -> Generator[None]:
    """Keep transformers from drawing bars while it loads and saves, and leave its setting as it was."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def deterministic_torch(device: str) -> Generator[None]:
    """Let torch use deterministic algorithms in the body; an operation that has none then raises RuntimeError.

    Before the first use of a GPU by this process (PyTorch, "Reproducibility", section on cuBLAS).
    """
    if torch.device(device).type == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be had.

    On a GPU torch has a class for it, but not for what CUDA and its libraries take beside torch. On a CPU its allocator
    raises a plain `RuntimeError` (a limit of the process or a strict overcommit policy was reached), and Python itself
    a `MemoryError`; a control group or a machine that runs out of pages kills the process instead.
    """
    text = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY)
    )


def short_cause(error: BaseException) -> str:
    """Return the first words of an out-of-memory error; torch goes on with the memory of every process on the GPU."""
    return str(error).partition("\n")[0].partition(" GPU ")[0] or type(error).__name__


def free_cached_memory(device: torch.device) -> None:
    """Give back what nothing uses any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
