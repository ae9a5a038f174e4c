"""Micro-batches, and a step for which the memory does not suffice.

The memory is that of a process of its own with a limit of the operating system on it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentlightning.engine.torch_setup import is_out_of_memory
from agentlightning.training.learner.micro_batches import microbatches

ROOT = Path(__file__).parents[3]


def test_micro_batches_hold_each_row_once_and_no_more_than_their_tokens() -> None:
    lengths = [3, 9, 4, 20, 4, 1]
    for packed in (True, False):
        for most in (1, 10, 12, 100):
            parts = microbatches(lengths, most, packed=packed)
            assert sorted(row for part in parts for row in part) == list(range(6))
            for part in parts:
                held = [lengths[row] for row in part]
                assert len(part) == 1 or (sum(held) if packed else len(held) * max(held)) <= most
    assert microbatches(lengths, 100, packed=True) == [[3, 1, 2, 4, 0, 5]]
    assert microbatches(lengths, 12, packed=False) == [[3], [1], [2, 4, 0], [5]]
    assert microbatches(lengths, 12, packed=True) == [[3], [1], [2, 4, 0, 5]]


_CHILD = """
import json, resource, sys
import psutil, torch
from agentlightning.training.learner.memory import free_memory
from agentlightning.training.learner.policy import Policy
from agentlightning.errors import OutOfMemoryError
from tests.training.learner.rows import make_advantages, make_rows
from tests.training.learner.test_update import digest

torch.set_num_threads(1)
count, longest, room = (int(number) for number in sys.argv[2:])
rows, advantages = make_rows(count, 80, shortest=longest - 4, longest=longest), make_advantages(count)
policy = Policy.load(sys.argv[1], learning_rate=1e-3)
policy.update(make_rows(2, 80), [1.0, -1.0])  # what torch makes on its first use is there
before = digest(policy)
limit = psutil.Process().memory_info().vms + room * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
free = free_memory("cpu")
found = {"free": free, "before": before}
try:
    result = policy.update(rows, advantages)
    found |= {"notes": result.notes, "steps": result.figures["steps"], "rows": len(result.rows)}
except OutOfMemoryError as error:
    found["error"] = str(error)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
found["after"] = digest(policy)
found["max_tokens"] = policy.state().max_tokens_per_forward
found["weights"] = [float(weight.double().sum()) for weight in policy.state().weights.values()]
print(json.dumps(found))
"""


def learn_in(room: int, model: Path, count: int, longest: int) -> dict[str, Any]:
    """Let a process with so many MiB to spare learn from rows; return its report."""
    command = [sys.executable, "-W", "ignore", "-c", _CHILD, str(model), str(count), str(longest), str(room)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.heavy
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of memory is one of Linux")
def test_a_step_without_the_memory_is_taken_in_smaller_parts_with_the_same_result(model_folder: Path) -> None:
    scarce, ample = (learn_in(room, model_folder, 24, 160) for room in (60, 2000))
    assert scarce["free"] <= 60 * 2**20
    assert (ample["notes"], ample["max_tokens"]) == ([], 4096)
    assert "out of memory with 24 rows" in scarce["notes"][0]
    assert "retrying the optimizer step from the same weights" in scarce["notes"][0]
    assert f"Set max_tokens_per_forward={scarce['max_tokens']}" in scarce["notes"][-1]
    assert scarce["max_tokens"] < 2000
    assert (scarce["steps"], scarce["rows"], scarce["before"]) == (1, 24, ample["before"])
    assert scarce["after"] != scarce["before"]
    assert scarce["weights"] == pytest.approx(ample["weights"], rel=1e-4, abs=1e-3)


@pytest.mark.heavy
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of memory is one of Linux")
def test_one_row_that_is_too_much_is_an_error_and_changes_no_weight(model_folder: Path) -> None:
    result = learn_in(2, model_folder, 2, 250)
    assert "one row of 2" in result["error"]
    assert "Try gradient_checkpointing=True" in result["error"]
    assert result["after"] == result["before"]


@pytest.mark.parametrize(
    ("error", "is_lack"),
    [
        (RuntimeError("shapes do not fit"), False),
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_only_a_lack_of_memory_is_one(error: Exception, is_lack: bool) -> None:
    assert is_out_of_memory(error) == is_lack
