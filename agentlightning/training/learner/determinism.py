"""Operations of torch that give the same bits each time: on a CPU all do, on a GPU they have to be asked for it."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch


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
