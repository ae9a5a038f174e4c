"""`agl.VERL` before it runs: a missing, unknown or impossible setting is an error at once. Needs no verl."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import BadRequestError
from tests.packaging import learning_settings

pytestmark = pytest.mark.timeout(900)  # each test starts a process that loads VERL


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"reward_fillna_value": 0.0}, r"reward_fillna_value has no effect: a rollout without a reward is excluded"),
        ({"trace_aggregator": {"level": "transition"}}, r"trace_aggregator has no effect: turns are merged"),
        ({"port": 9999}, r"port has no effect: the Trainer's store"),
        ({"step_timeout": 5}, r"no setting 'step_timeout'.*Did you mean 'step_timeout_seconds'"),
    ],
)
def test_a_setting_that_has_no_effect_is_refused_by_name(own: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        agl.VERL({"agentlightning": own})


@pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed (make test-verl)")
def test_the_page_of_settings_lists_those_of_the_installed_version() -> None:
    ours = learning_settings.names_of("verl")
    assert ours == learning_settings.installed("verl"), "run: python -m tests.packaging.learning_settings verl"


@pytest.mark.parametrize("config", ["ppo", ["trainer.nnodes=2"], None])
def test_what_is_no_dict_is_refused(config: Any) -> None:
    with pytest.raises(TypeError, match=r"VERL requires a dict of VERL's settings"):
        agl.VERL(config)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        pytest.param(
            "trainer.nnodes=1",
            "agl-framework[verl]",
            marks=pytest.mark.skipif(find_spec("verl") is not None, reason="verl is installed here"),
        ),
        ("trainer.nnodes", "'trainer.nnodes': expected key=value"),
    ],
)
def test_the_program_says_what_is_missing(argument: str, says: str) -> None:
    command = [sys.executable, "-m", "agentlightning.verl", argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize("trainer", ["verl", "grpo"])
def test_the_script_for_a_gpu_says_what_the_machine_lacks(trainer: str) -> None:
    if find_spec("vllm") is not None:
        pytest.skip("vllm is installed here: the script would train, see make bench-gpu")
    command = [sys.executable, "-m", "bench.pretrained.on_gpu", "--trainer", trainer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("skipped: ")
    assert "vllm" in done.stdout


def test_the_script_for_a_gpu_has_settings_that_grpo_takes(tmp_path: Path) -> None:
    from bench.pretrained.on_gpu import make_algorithm

    algorithm = make_algorithm("grpo", tmp_path, tmp_path / "run", seed=3)
    assert isinstance(algorithm, agl.GRPO)
    assert (algorithm.settings.use_vllm, algorithm.settings.device, algorithm.settings.seed) == (True, "cuda", 3)
