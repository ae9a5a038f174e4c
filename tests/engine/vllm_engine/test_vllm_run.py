"""GRPO whose policy is served by a vLLM server of its own: a process with vLLM's command line, routes and fields."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import agentlightning as agl
from agentlightning.engine.vllm import VLLMEngine
from agentlightning.engine.vllm_server import VLLMSettings
from agentlightning.errors import BadRequestError, EngineError
from agentlightning.training.learner.policy import Policy
from tests.algorithm.parts import ask, fit, metrics_of, say, wants_digits

pytestmark = pytest.mark.heavy

TASKS = ["one", "two", "three", "four"]
STAND_IN = (sys.executable, "-m", "tests.engine.vllm_engine.stand_in")
VLLM: dict[str, Any] = {"use_vllm": True, "vllm_command": STAND_IN, "max_completion_length": 12}
LEARNS: dict[str, Any] = {"max_steps": 6, "batch_size": 4, "num_generations": 8, "learning_rate": 5e-3}


def log_of(folder: Path) -> str:
    return (folder / "vllm.log").read_text()


def first_rewards_are_below_last(result: Any) -> bool:
    rewards = [figures.mean_reward or 0.0 for figures in result.metrics]
    return sum(rewards[-2:]) > sum(rewards[:2]) + 0.1


def test_it_learns_from_what_vllm_generates(untrained_model: Path, tmp_path: Path) -> None:
    result = fit(wants_digits, TASKS, model=untrained_model, output_dir=tmp_path, num_iterations=2, **VLLM, **LEARNS)
    assert first_rewards_are_below_last(result)
    assert result.steps == LEARNS["max_steps"]
    for figures in result.metrics:  # the server's log-probabilities are the learner's: it has the same weights
        assert figures.update["first_ratio_error"] < 1e-4
        assert figures.calls_trained == figures.calls_captured > 0
        assert figures.tokens_per_second > 0
    assert log_of(tmp_path).count("POST /collective_rpc") == LEARNS["max_steps"]
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if "serve" in command and str(untrained_model) in command]


@pytest.mark.parametrize("setting", [{"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.5}])
def test_settings_of_sampling_are_fields_of_its_requests_and_the_first_ratio_is_one(
    untrained_model: Path, tmp_path: Path, setting: Any
) -> None:
    @agl.rollout
    def silent(task: str, llm: agl.LLM) -> float:
        return float(len(ask(llm.model_copy(update={"sampling_parameters": {}}), [say(task)])["content"]))

    result = fit(silent, TASKS, model=untrained_model, output_dir=tmp_path, max_steps=1, **VLLM, **setting)
    [line] = metrics_of(result)
    assert line["calls_constrained"] == dict.fromkeys(setting, line["calls_trained"])
    assert line["update"]["first_ratio_error"] < 1e-4


@pytest.mark.parametrize("lora", [None, {"r": 4, "target_modules": "all-linear"}])
def test_it_sleeps_while_the_learner_updates(untrained_model: Path, tmp_path: Path, lora: Any) -> None:
    settings = {**VLLM, "vllm_enable_sleep_mode": True, "max_steps": 2, "learning_rate": 5e-3, "lora": lora}
    result = fit(wants_digits, TASKS, model=untrained_model, output_dir=tmp_path, **settings)
    assert all(figures.update["first_ratio_error"] < 1e-4 for figures in result.metrics)
    log = log_of(tmp_path)
    assert log.count(f"POST /sleep level={1 if lora else 2}&mode=wait") == 2
    assert log.index("tags=weights") < log.index("tags=kv_cache") < log.index("POST /reset_prefix_cache")
    assert log.count("/v1/load_lora_adapter") == (2 if lora else 0)


def test_a_server_that_dies_is_started_again_with_the_present_weights(untrained_model: Path, tmp_path: Path) -> None:
    dies = tmp_path / "dies"
    event = threading.Event()

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        reply = ask(llm, [say(task)])["content"]
        if not event.is_set():
            event.set()
            dies.touch()
            while dies.exists():  # the server takes it away as it ends
                time.sleep(0.01)
        return float(len(reply))

    os.environ["STAND_IN_DIES_AT"] = str(dies)
    try:
        result = fit(agent, TASKS, model=untrained_model, output_dir=tmp_path / "run", max_steps=3, **VLLM)
    finally:
        del os.environ["STAND_IN_DIES_AT"]
    assert result.steps == 3
    assert [figures.rollouts_failed for figures in result.metrics] == [0, 0, 0]  # calls waited for the server
    assert not (tmp_path / "run" / "vllm-weights").exists()
    assert all(figures.update["first_ratio_error"] < 1e-4 for figures in result.metrics)


@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("vllm") is None, reason="needs a GPU and vLLM")
@pytest.mark.parametrize("lora", [None, {"r": 8, "target_modules": "all-linear"}])
def test_it_learns_with_vllm_itself(untrained_model: Path, tmp_path: Path, lora: Any) -> None:
    settings = {**LEARNS, "device": "cuda", "lora": lora, "use_vllm": True, "vllm_enable_sleep_mode": True}
    result = fit(wants_digits, TASKS, model=untrained_model, output_dir=tmp_path, num_iterations=2, **settings)
    assert first_rewards_are_below_last(result)
    assert all(figures.update["first_ratio_error"] < 0.1 for figures in result.metrics)


def test_a_server_that_runs_already_is_used_and_left(untrained_model: Path, tmp_path: Path) -> None:
    settings = VLLMSettings(use_vllm=True, vllm_command=STAND_IN)
    own = VLLMEngine(Policy.load(untrained_model), settings, model=str(untrained_model), folder=tmp_path)
    own.start()
    try:
        os.environ["VLLM_API_KEY"] = own.api_key or ""
        server: dict[str, Any] = {"use_vllm": True, "vllm_server_base_url": own.base_url.removesuffix("/v1")}
        result = fit(wants_digits, TASKS, model=untrained_model, output_dir=tmp_path / "run", max_steps=2, **server)
        assert all(figures.update["first_ratio_error"] < 1e-4 for figures in result.metrics)
        with own.paused():
            pass
    finally:
        os.environ.pop("VLLM_API_KEY", None)
        own.stop()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_command": ("no-such-program",)}, "'no-such-program' cannot be started"),
        (
            {"vllm_command": (sys.executable, "-c", "print('out of GPU memory'); raise SystemExit(3)")},
            "(?s)status 3 .*out of GPU memory",
        ),
        ({}, "pip install vllm"),
        ({"vllm_server_base_url": "http://127.0.0.1:9"}, "VLLM_SERVER_DEV_MODE=1"),
    ],
    ids=["absent", "ends", "without vLLM", "not there"],
)
def test_a_server_that_does_not_start_says_why(
    untrained_model: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        fit(wants_digits, TASKS, model=untrained_model, output_dir=tmp_path, use_vllm=True, **settings)


def test_a_server_that_does_not_take_the_weights_ends_the_run(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAILS", "/collective_rpc")
    with pytest.raises(EngineError, match=r"POST /collective_rpc .* 500: .*made to fail"):
        fit(wants_digits, TASKS, model=untrained_model, output_dir=tmp_path, **VLLM)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_enable_sleep_mode": True}, "no effect without use_vllm=True"),
        ({"use_vllm": True, "deterministic": True}, "use_vllm=True and deterministic=True"),
        ({"use_vllm": True, "top_k": 5, "temperature": 0.7}, r"temperature=0.7 and top_k: .*set temperature=1"),
        ({"use_vllm": True, "vllm_weight_transfer": "ipc", "lora": {"r": 4}}, "adapters with a separate API"),
        ({"use_vllm": True, "vllm_weight_transfer": "nccl"}, "one of 'folder', 'ipc'; got 'nccl'"),
        ({"use_vllm": True, "vllm_server_base_url": "localhost:8000/v1"}, "without a path"),
        ({"use_vllm": True, "vllm_server_base_url": "http://h:1", "vllm_args": ("--x",)}, "is already running"),
        ({"use_vllm": True, "vllm_args": "--quantization fp8"}, "a tuple of strings"),
        ({"use_vllm": True, "vllm_gpu_memory_utilization": 30}, "at most 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        agl.GRPO("model", **settings)


def test_the_page_s_programs_are_accepted() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "train-on-a-gpu.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        made: dict[str, Any] = {}
        exec(program, made)
        assert made["algorithm"].settings.use_vllm
