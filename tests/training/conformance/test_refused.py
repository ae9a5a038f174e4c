"""A run that must not begin is refused in one error that says what to change, and no folder is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.training.conformance.cases import ALL, GRPO, HELD_OUT, OURS, PPO, SFT, TRL, VERL, Case, Digits, each, fit

JUDGE = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="judge")


def refusal(case: Case, model: Path | str, folder: Path, **settings: Any) -> str:
    with pytest.raises(agl.BadRequestError) as refused:
        fit(case, Digits(case.roles), model, folder, **settings)  # pyright: ignore[reportArgumentType]
    return str(refused.value)


@each(*ALL)
def test_what_no_algorithm_can_run_with_is_refused_with_what_to_give(
    case: Case, untrained_model: Path, tmp_path: Path
) -> None:
    name = case.name.partition("-")[0]
    for tasks in (None, []):
        assert f"{name} needs tasks: pass train_dataset" in refusal(case, untrained_model, tmp_path, tasks=tasks)
    if not case.staleness:
        message = refusal(case, untrained_model, tmp_path, held_out=[], eval_steps=2)
        assert "=2 has no effect" in message
        assert "val_dataset" in message
    message = refusal(case, untrained_model, tmp_path, trainer_adapter=agl.TraceToMessages())
    assert "adapter TraceToMessages returns none. Use TracerTraceToTriplet" in message
    for model in ("no/where/at/all", "no-such-owner/no-such-model", "misspelt"):
        message = refusal(case, model, tmp_path)
        named = f"model.path='{model}' is not a model" if case is VERL else f"model='{model}' is neither a folder nor"
        assert named in message
    assert not (tmp_path / "run").exists()


@each(*ALL)
def test_an_output_folder_that_cannot_be_used_is_refused_and_left_as_it_is(
    case: Case, untrained_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    message = refusal(case, untrained_model, tmp_path, output_dir=tmp_path / "file" / "run")
    assert "file/run' cannot be written" in message
    held = tmp_path / "held"
    held.mkdir()
    (held / "metrics.jsonl").write_text("{}\n")
    assert "already has a run" in refusal(case, untrained_model, tmp_path, output_dir=held)
    assert [path.name for path in held.iterdir()] == ["metrics.jsonl"]


@each(*OURS, TRL)
def test_what_does_not_go_with_the_model_is_refused(case: Case, untrained_model: Path, tmp_path: Path) -> None:
    message = refusal(case, untrained_model, tmp_path, max_completion_length=512)
    assert "max_completion_length=512 leaves no room" in message
    assert "256 tokens" in message


@each(GRPO, PPO, SFT, TRL)
def test_a_second_model_by_the_name_of_the_policy_is_refused(case: Case, untrained_model: Path, tmp_path: Path) -> None:
    parameters = {"model": "hosted_vllm/p", "api_base": "http://127.0.0.1:9"}
    entry: Any = {"model_name": "policy", "litellm_params": parameters}
    message = refusal(case, untrained_model, tmp_path, trainer_llm_proxy=agl.LLMProxy(model_list=[entry]))
    assert "already serves a model named 'policy'" in message


@each(GRPO, PPO, SFT, TRL)
@pytest.mark.parametrize("name", ["main_llm", "policy"])
def test_a_resource_by_the_name_of_the_policy_is_refused(
    case: Case, untrained_model: Path, tmp_path: Path, name: str
) -> None:
    settings: dict[str, Any] = {"trainer_initial_resources": {name: JUDGE}, "resource_name": name}
    message = refusal(case, untrained_model, tmp_path, **settings)
    assert f"initial_resources has '{name}'" in message
    assert "Rename the resource" in message


@each(GRPO, PPO, SFT)
@pytest.mark.parametrize("device", ["cuda:99", "gpu", "meta"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(
    case: Case, untrained_model: Path, tmp_path: Path, device: str
) -> None:
    message = refusal(case, untrained_model, tmp_path, device=device, held_out=HELD_OUT)
    assert f"device='{device}' cannot be used: " in message
    assert "sees these devices: cpu" in message
    assert not (tmp_path / "run").exists()


@each(GRPO, PPO, TRL)
def test_a_curriculum_that_cannot_choose_is_refused(case: Case, untrained_model: Path, tmp_path: Path) -> None:
    message = refusal(case, untrained_model, tmp_path, curriculum="solve_rate", held_out=HELD_OUT)
    assert "curriculum has no effect with batch_size=4 and 4 tasks" in message
