"""The result of a run, as a person reads it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.training.result import Evaluation, GRPOResult
from tests.stubs.processes import run_program


def _evaluation(*rewards: float | None, step: int = 0, sampling: str = "greedy") -> Evaluation:
    return Evaluation(step, sampling, list(rewards), [f"ro-{n}" for n, _ in enumerate(rewards)], 0.0)


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        (
            (1.0, 0.0, None, 1.0),
            "greedy: mean reward 0.667 (0.208 to 0.939, Wilson), 2 of 4 tasks solved, 1 without a reward",
        ),
        ((0.25, 0.75), "greedy: mean reward 0.500 (0.000 to 1.000, Student's t), 2 tasks"),
        ((None,), "greedy: mean reward -, 0 of 1 task solved, 1 without a reward"),
        ((), "greedy: mean reward -, 0 of 0 tasks solved"),
    ],
)
def test_an_evaluation_shows_the_mean_with_its_interval_and_how_many_tasks_were_solved(
    rewards: tuple[float | None, ...], text: str
) -> None:
    assert str(_evaluation(*rewards)) == text


def test_a_result_is_a_few_lines_with_what_was_before_and_after() -> None:
    evaluations = [
        _evaluation(0.25, 0.25),
        _evaluation(0.5, 0.75, step=1),
        _evaluation(0.0, 0.0, 0.0, 0.0, sampling="sampled"),
        _evaluation(1.0, 1.0, 1.0, 0.0, step=1, sampling="sampled"),
    ]
    result = GRPOResult(Path("runs/one"), 1, evaluations, train_seconds=1.25, late_calls={"late": 1})
    assert str(result).splitlines() == [
        "1 update, 1.2 s of training",
        "2 held-out tasks, greedy: mean reward 0.250 -> 0.625, difference +0.375 (-1.000 to +1.000, Student's t); "
        "no evidence, p = 0.5 (sign-flip permutation test, exact)",
        "4 held-out tasks, sampled: mean reward 0.000 -> 0.750 (0.0% -> 75.0% solved), "
        "difference +0.750 (-0.111 to +1.000, Bonett-Price); no evidence, p = 0.25 (exact sign test)",
        "1 model call, 0 trained, 1 excluded",
        "the model is in runs/one/model",
    ]
    result.run_id, result.store = "run-1", "memory, until this program ends"
    assert "1 excluded; to keep the reasons, set store='sqlite:///run.db' of the Trainer" in str(result)
    result.store = "PostgresLightningStore"
    assert "1 excluded (agl runs ledger run-1 --store STORE)" in str(result)


PROGRAM = """
import sys
import openai
import agentlightning as agl

@agl.rollout
def agent(task: str, llm: agl.LLM) -> float:
    with openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "unused") as client:
        client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task}], **llm.sampling_parameters
        )
    return 0.25

if __name__ == "__main__":
    algorithm = agl.GRPO(model=sys.argv[1], output_dir="out", max_steps=3, batch_size=1, num_generations=2,
                         max_completion_length=2, seed=0)
    trainer = agl.Trainer(algorithm=algorithm, strategy="shm", store="sqlite:///a run.db")
    trainer.fit(agent, train_dataset=["one"], val_dataset=["two"])
    print(trainer.result)
"""


def test_a_program_without_logging_reads_each_alarm_once_and_its_result_in_lines(
    untrained_model: Path, tmp_path: Path
) -> None:
    program = [sys.executable, "-c", PROGRAM, str(untrained_model)]
    ended = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("alarm nothing_trained") == 1
    assert "alarm" not in ended.stderr
    shown = ended.stdout.split("rollouts 2 done")[-1].splitlines()[1:]
    assert shown[-1] == "the model is in out/model"
    assert shown[-2].startswith("6 model calls, 0 trained, 6 excluded (agl runs ledger run-")
    ledger = run_program(*shlex.split(shown[-2].partition("(")[2].removesuffix(")")), folder=tmp_path)
    assert "equal_rewards" in ledger.stdout
    refused = run_program("agl", "runs", "list", "--store", "out", folder=tmp_path, code=2)
    assert "'out' has no store.db. Pass the store that the program used: 'sqlite:///a run.db'" in refused.stderr
    unchanged = "mean reward 0.250 -> 0.250, difference +0.000; no evidence, p = 1 (exact sign test)"
    assert f"1 held-out task, greedy: {unchanged}" in shown
    assert len(shown) <= 6
