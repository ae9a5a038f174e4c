"""The page on Gymnasium: its programs, with the real package and a scripted model, as its reader runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.terminal import shell
from tests.pages import blocks
from tests.stubs.model_server import ModelServer
from tests.stubs.processes import run_program

pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install gymnasium")
pytest.importorskip("openai", reason="openai is not installed (the extra demo has it)")

PAGE = "how-to/gymnasium.md"


def halves(request: dict[str, Any]) -> str:
    """A model that halves the range with each guess."""
    low, high = 1, 9
    texts = [message["content"] for message in request["messages"]]
    for guess, reply in zip(texts[1::2], texts[2::2], strict=True):
        low, high = (int(guess) + 1, high) if reply == "higher" else (low, int(guess) - 1)
    return f" {(low + high) // 2}\n"


def ones(request: dict[str, Any]) -> str:
    """A model that always guesses 1."""
    return "1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    for block in blocks(PAGE):
        if file := re.match(r"# (\S+\.py)\n", block):
            (tmp_path / file[1]).write_text(block)
    return tmp_path


def tries(folder: Path, server: ModelServer, *words: str) -> Any:
    server.models = [{"id": "m"}]
    done = shell("env", "try", "player.py:environment", "--model", server.base_url, *words, cwd=folder)
    assert (done.returncode, "Warn" in done.stderr) == (0, False), done.stderr  # gymnasium warns of wrong spaces
    return done


def test_the_command_of_the_page_prints_what_the_page_shows(folder: Path) -> None:
    with ModelServer(lambda request: halves(request).strip()) as server:
        done = tries(folder, server)
    [shown] = blocks(PAGE, "text")
    assert done.stdout.startswith(shown)
    assert done.stdout.splitlines()[-1] == "3 tasks: mean reward 0.867"


GAMES: list[tuple[Any, float, int]] = [(halves, 0.8, 3), (ones, -0.4, 4), (str, -1.0, 1)]


@pytest.mark.parametrize(("model", "reward", "calls"), GAMES)
def test_rewards_of_steps_are_emitted_and_their_sum_counts(folder: Path, model: Any, reward: float, calls: int) -> None:
    """A solved game, one that ends by its limit of steps, and one with an invalid action."""
    with ModelServer(model) as server:
        [rollout] = json.loads(tries(folder, server, "--tasks", "1", "--json", "--store", "agl.db").stdout)["rollouts"]
    assert rollout["reward"] == pytest.approx(reward)
    assert len(rollout["messages"]) == calls
    shown = shell("rollouts", "show", rollout["rollout_id"], "--store", "agl.db", "--spans", cwd=folder).stdout
    assert shown.count("reward primary=-0.1") == {0.8: 2, -0.4: 4, -1.0: 0}[reward]
    explained = shell("rollouts", "explain", rollout["rollout_id"], "--store", "agl.db", "--json", cwd=folder).stdout
    rows = [call["row"] for call in json.loads(explained)["calls"]]
    assert len(set(rows)) == 1


def test_the_program_that_trains_is_right_but_for_its_model(folder: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'agl-framework[grpo]'")
    from tests.algorithm.parts import save_untrained_model

    save_untrained_model(folder / "my-model-folder")
    program = (folder / "train.py").read_text()
    small = "max_steps=1, batch_size=1, num_generations=2, max_completion_length=4"
    (folder / "train.py").write_text(program.replace("max_steps=50", small).replace("[48:]", "[63:]"))
    run_program("python", "train.py", folder=folder)
    assert (folder / "runs").is_dir()
