"""`agl.VERL` before it runs: what is missing, unknown or impossible is said at once. Needs no verl."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import BadRequestError

pytestmark = pytest.mark.timeout(900)  # each test starts a process that loads VERL


def test_a_bare_name_says_which_setting_is_missing_and_loads_no_training_stack() -> None:
    program = (
        "import sys, agentlightning as agl\n"
        "try:\n    agl.Trainer(algorithm='verl', store=agl.InMemoryLightningStore())\n"
        "except TypeError as error:\n    print(error)\n"
        "print([name for name in ('torch', 'verl', 'ray', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    message, loaded = done.stdout.splitlines()
    assert "config" in message
    assert "missing" in message
    assert loaded == "[]"


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"reward_fillna_value": 0.0}, r"reward_fillna_value has no effect: a rollout without a reward is left out"),
        ({"trace_aggregator": {"level": "transition"}}, r"trace_aggregator has no effect: turns are merged"),
        ({"port": 9999}, r"port has no effect: there is one mode"),
        ({"step_timeout": 5}, r"no setting 'step_timeout'.*Did you mean 'step_timeout_seconds'"),
    ],
)
def test_a_setting_that_has_no_effect_is_refused_by_name(own: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        agl.VERL({"agentlightning": own})


@pytest.mark.parametrize("config", ["ppo", ["trainer.nnodes=2"], None])
def test_what_is_no_dict_is_refused(config: Any) -> None:
    with pytest.raises(TypeError, match=r"VERL takes a dict of VERL's settings"):
        agl.VERL(config)


def test_without_verl_the_extra_is_named() -> None:
    try:
        import verl  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        pass
    else:
        pytest.skip("verl is installed here")
    with pytest.raises(ImportError, match=r"agl-framework\[verl\]"):
        agl.VERL({})
    done = subprocess.run(
        [sys.executable, "-m", "agentlightning.verl", "trainer.nnodes=1"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 2
    assert "agl-framework[verl]" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_argument_that_is_no_pair_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agentlightning.verl", "trainer.nnodes"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 2
    assert "'trainer.nnodes': expected key=value" in done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize("trainer", ["verl", "grpo"])
def test_the_script_for_a_gpu_says_what_the_machine_lacks(trainer: str) -> None:
    if importlib.util.find_spec("vllm") is not None:
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
