"""What a run needs is summed up before it starts; a step for which the memory does not suffice is taken in parts.

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

from agentlightning.engine.out_of_memory import is_out_of_memory
from agentlightning.errors import OutOfMemoryError
from agentlightning.training.learner.memory import GIB, check_memory, free_memory, needed_memory
from agentlightning.training.learner.policy import Policy
from agentlightning.training.ppo_settings import PPOSettings
from agentlightning.training.settings import GRPOSettings, make_settings

ROOT = Path(__file__).parents[3]


def settings(model: Path, **others: Any) -> GRPOSettings:
    return GRPOSettings(model=str(model), **{"max_completion_length": 100, **others})


def part(given: GRPOSettings, start: str, **others: Any) -> int:
    return sum(one.bytes for one in needed_memory(given, **others) if one.what.startswith(start))


def test_the_sum_counts_the_weights_that_there_are(model_folder: Path, policy: Policy) -> None:
    weights = sum(weight.numel() for weight in policy.model.parameters())
    plain = settings(model_folder)
    assert (part(plain, "weights"), part(plain, "gradients"), part(plain, "state")) == tuple(
        size * weights for size in (4, 4, 8)
    )
    half = settings(model_folder, bf16=True)
    assert (part(half, "weights"), part(half, "float32 copies"), part(half, "state")) == tuple(
        size * weights for size in (2, 4, 8)
    )
    assert (part(plain, "the reference"), part(plain, "the reference", keeps_reference=True)) == (0, 4 * weights)
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    adapted = settings(model_folder, lora=lora)
    learned = sum(w.numel() for w in Policy.load(model_folder, lora=lora).state().weights.values())
    assert part(adapted, "weights") == 4 * weights
    assert (part(adapted, "adapters"), part(adapted, "gradients"), part(adapted, "state")) == tuple(
        size * learned for size in (4, 4, 8)
    )
    assert part(adapted, "the reference", keeps_reference=True) == 0


def test_what_the_settings_save_is_in_the_sum(model_folder: Path) -> None:
    plain = settings(model_folder, max_model_length=128)
    small = settings(model_folder, max_model_length=128, max_tokens_per_forward=1024)
    assert part(plain, "activations") == 4 * part(small, "activations")
    trained = ("logits of 3,200 trained tokens", "logits of 800 trained tokens")  # 100 of the 128 of a row
    assert part(plain, trained[0]) == 4 * part(small, trained[1]) > 0
    checkpointed = settings(model_folder, max_model_length=128, gradient_checkpointing=True)
    assert part(checkpointed, "activations") < 0.7 * part(plain, "activations")
    half = settings(model_folder, max_model_length=64)
    assert part(plain, "keys") == 2 * part(half, "keys")


def test_a_value_head_is_counted(model_folder: Path) -> None:
    given = make_settings(PPOSettings, model_folder, {"max_completion_length": 100})
    assert part(given, "value head") > 4 * 4 * 32
    assert part(settings(model_folder), "value head") == 0


def test_no_more_calls_are_counted_than_a_step_has_rollouts(model_folder: Path) -> None:
    plain = settings(model_folder)
    few = settings(model_folder, batch_size=1, num_generations=2)
    assert part(plain, "keys and values of 64 calls") == 32 * part(few, "keys and values of 2 calls")


def test_what_engine_and_update_hold_in_turn_is_not_added(model_folder: Path) -> None:
    def parts(**others: Any) -> dict[str, int]:
        return {one.what: one.bytes for one in needed_memory(settings(model_folder, max_model_length=8, **others))}

    small = parts(max_tokens_per_forward=8, engine_batch=8, batch_size=4, num_generations=2)
    assert "gradients" in small
    assert "logits of 8 calls" not in small
    many = parts(max_tokens_per_forward=8, engine_batch=8192, batch_size=4096, num_generations=2)
    assert "logits of 8192 calls" in many
    assert not {"gradients", "logits of 8 trained tokens"} & many.keys()
    kept = ("weights, float32", "state of AdamW, two numbers a weight")
    assert [many[name] for name in kept] == [small[name] for name in kept]


def test_a_run_that_cannot_fit_is_refused_with_the_sum_and_what_to_change(model_folder: Path) -> None:
    check_memory(settings(model_folder))
    tokens = 2**40
    with pytest.raises(OutOfMemoryError) as refused:
        check_memory(settings(model_folder, max_tokens_per_forward=tokens))
    text = str(refused.value)
    assert f"{free_memory('cpu') / GIB:.0f}"[:1] in text.splitlines()[0]
    assert f"activations of {tokens:,} tokens in one forward" in text
    assert (
        "What makes it smaller, the most first: gradient_checkpointing=True, or a smaller max_tokens_per_forward"
        in text
    )


def test_other_errors_are_no_lack_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


_CHILD = """
import json, resource, sys
import psutil, torch
from agentlightning.training.ppo_settings import PPOSettings
from agentlightning.training.settings import make_settings
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
    """Let a process with so many MiB to spare learn from rows; return what it tells."""
    command = [sys.executable, "-W", "ignore", "-c", _CHILD, str(model), str(count), str(longest), str(room)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.heavy
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of memory is one of Linux")
def test_a_step_without_the_memory_is_taken_in_smaller_parts_with_the_same_result(model_folder: Path) -> None:
    scarce, ample = (learn_in(room, model_folder, 24, 160) for room in (60, 2000))
    assert scarce["free"] <= 60 * 2**20
    assert (ample["notes"], ample["max_tokens"]) == ([], 4096)
    assert "out of memory with 24 rows" in scarce["notes"][0]
    assert "begun again from the same weights" in scarce["notes"][0]
    assert f"set max_tokens_per_forward={scarce['max_tokens']}" in scarce["notes"][-1]
    assert scarce["max_tokens"] < 2000
    assert (scarce["steps"], scarce["rows"], scarce["before"]) == (1, 24, ample["before"])
    assert scarce["after"] != scarce["before"]
    assert scarce["weights"] == pytest.approx(ample["weights"], rel=1e-4, abs=1e-3)


@pytest.mark.heavy
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of memory is one of Linux")
def test_one_row_that_is_too_much_is_an_error_and_changes_no_weight(model_folder: Path) -> None:
    found = learn_in(2, model_folder, 2, 250)
    assert "one row of 2" in found["error"]
    assert "Try gradient_checkpointing=True" in found["error"]
    assert found["after"] == found["before"]
