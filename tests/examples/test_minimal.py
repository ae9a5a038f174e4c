"""examples/minimal: each program prints what its README shows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.examples.shown import EXAMPLES, Shown, run, same, shown


@pytest.mark.parametrize("one", shown("minimal"), ids=lambda one: one.command.split("/")[-1])
def test_each_program_prints_what_its_readme_shows(one: Shown) -> None:
    printed = run(one.command)
    assert same(printed, one.output, tolerance=0.02), printed


def test_metrics_go_to_the_terminal_and_to_prometheus_at_once() -> None:
    printed = run("python examples/minimal/write_metrics.py --console")
    assert 'agl_rollouts_total{mode="train",status="succeeded"} 19.0' in printed


@pytest.mark.heavy
def test_a_vllm_server_is_started_asked_and_ended(tmp_path: Path) -> None:
    """Over the process that stands for vLLM where there is no GPU, with a real small model."""
    pytest.importorskip("torch")
    from agentlightning.demo.model import make_model, make_tokenizer
    from agentlightning.training.learner.policy import Policy

    tokenizer = make_tokenizer()
    Policy(make_model(tokenizer), tokenizer).save(tmp_path)
    command = f"{sys.executable} -m tests.engine.vllm_engine.stand_in"
    settings = "--logprobs-mode processed_logprobs --dtype float32 --max-model-len 64 --max-num-seqs 2"
    settings += " --tensor-parallel-size 1 --seed 0 --gpu-memory-utilization 0.5"
    program = f"python examples/minimal/vllm_server.py {tmp_path} --command '{command}' {settings}"
    printed = run(program, PYTHONPATH=".")
    assert printed.splitlines() == ["ready: True", "tokens: 5", "ended: True"]


@pytest.mark.parametrize("program", ["write_traces", "write_metrics", "llm_proxy", "vllm_server"])
def test_each_program_says_how_it_is_run(program: str) -> None:
    path = EXAMPLES / "minimal" / f"{program}.py"
    spec = importlib.util.spec_from_file_location(program, path)
    assert spec is not None
    assert spec.loader is not None
    source = spec.loader.get_source(program)  # type: ignore[attr-defined]  # pyright: ignore
    assert f"\n    python examples/minimal/{program}.py" in source
