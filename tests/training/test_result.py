"""The result of a run, as a person reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.training.result import Evaluation, GRPOResult


def _evaluation(*rewards: float | None, step: int = 0, sampling: str = "greedy") -> Evaluation:
    return Evaluation(step, sampling, list(rewards), [f"ro-{n}" for n, _ in enumerate(rewards)], 0.0)


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        ((1.0, 0.0, None, 1.0), "mean reward 0.667 greedy (50.0% solved)"),
        ((0.25, 0.75, None), "mean reward 0.500 greedy"),
        ((None,), "mean reward - greedy (0.0% solved)"),
        ((), "mean reward - greedy (0.0% solved)"),
    ],
)
def test_an_evaluation_shows_the_mean_and_a_share_where_rewards_are_not_graded(
    rewards: tuple[float | None, ...], text: str
) -> None:
    assert str(_evaluation(*rewards)) == text


def test_a_result_is_a_few_lines_with_what_was_before_and_after() -> None:
    evaluations = [
        _evaluation(0.25, 0.25),
        _evaluation(0.5, 0.75, step=3),
        _evaluation(1.0, step=3, sampling="sampled"),
    ]
    result = GRPOResult(Path("runs/one"), 3, evaluations, train_seconds=1.25, late_calls={"late": 2})
    assert str(result).splitlines() == [
        "3 updates, 1.2 s of training",
        "2 held-out tasks, greedy: mean reward 0.250 -> 0.625; no evidence, p = 0.5 (exact permutation test)",
        "1 held-out tasks, sampled: mean reward 1.000 -> 1.000 (100.0% -> 100.0% solved); "
        "no evidence, p = 1 (exact sign test)",
        "2 model calls, 0 trained, 2 excluded (agl runs ledger)",
        "the model is in runs/one/model",
    ]


PROGRAM = """
import sys
import openai
import agentlightning as agl

@agl.rollout
def agent(task: str, llm: agl.LLM) -> float:
    with openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none") as client:
        client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task}], **llm.sampling_parameters
        )
    return 0.25

if __name__ == "__main__":
    algorithm = agl.GRPO(model=sys.argv[1], output_dir="out", max_steps=3, batch_size=1, num_generations=2,
                         max_completion_length=2, seed=0)
    trainer = agl.Trainer(algorithm=algorithm, strategy="shm", store="memory")
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
    assert shown[-2:] == ["6 model calls, 0 trained, 6 excluded (agl runs ledger)", "the model is in out/model"]
    unchanged = "mean reward 0.250 -> 0.250; no evidence, p = 1 (exact sign test)"
    assert f"1 held-out tasks, greedy: {unchanged}" in shown
    assert len(shown) <= 6
