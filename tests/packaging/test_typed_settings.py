"""A misspelt setting is an error before anything runs, and a result has the type that its algorithm returns: a type
checker, and so an editor, knows each by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.stubs.processes import run_program

ROOT = Path(__file__).parents[2]
PROGRAM = """
import agentlightning as agl

agl.GRPO("m", max_steps=3, num_generations=4, group_reward=None)
agl.PPO("m", cliprange=0.1, gamma=0.9)
agl.SFT("m", min_reward=1.0, choose=lambda rollout, reward: reward > 0)
print(agl.Trainer(algorithm=agl.GRPO("m")).result.steps)
print(agl.Trainer(algorithm="grpo").result.anything)
agl.GRPO("m", max_stepz=3)
agl.GRPO("m", max_steps="3")
agl.PPO("m", clip_range=0.1)
agl.SFT("m", min_rewards=1.0)
print(agl.Trainer(algorithm=agl.GRPO("m")).result.stepz)
"""


@pytest.mark.slow
def test_a_type_checker_knows_every_setting_by_its_name_and_type(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = ("-m", "basedpyright", "--outputjson", "--project", ROOT, program)
    done = run_program("python", *words, folder=ROOT, timeout=300, code=None)
    errors = {each["range"]["start"]["line"]: each["message"] for each in json.loads(done.stdout)["generalDiagnostics"]}
    lines = [PROGRAM.splitlines()[line].strip() for line in sorted(errors)]
    assert lines == [line.strip() for line in PROGRAM.splitlines()[8:]]
    names = ["max_stepz", "max_steps", "clip_range", "min_rewards", "stepz"]
    assert [name in text for name, (_, text) in zip(names, sorted(errors.items()), strict=True)] == [True] * 5
