"""examples/textworld: games of the real package, run with scripted models."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.training.ledger import RolloutRecord, read_rollout
from tests.examples.shown import EXAMPLES, ROOT
from tests.frameworks.engine import Engine, Json

pytest.importorskip("textworld", reason="textworld is not installed: make test-example NAMES=textworld")

pytestmark = pytest.mark.filterwarnings("ignore:Game .* is not fully supported")


@pytest.fixture
def games(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES / "textworld")
    return importlib.import_module("games")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("games")  # to make a game takes some seconds


def walkthrough(task: Any) -> list[str]:
    """Return the commands with which the game's own description solves it."""
    return json.loads(Path(task["file"]).with_suffix(".json").read_text())["metadata"]["walkthrough"]


def follows(commands: list[str]) -> Callable[[Json], str]:
    """A model that says one command after another, the way that models often write them."""
    return lambda request: f"> {commands[len(request['messages']) // 2 - 1].capitalize()}.\nThis helps."


def run_games(games: Any, tasks: list[Any], answer: Callable[[Json], str]) -> tuple[list[RolloutRecord], list[Json]]:
    """Run tasks through a Trainer and its gateway; return their records and the requests to the model."""

    @agl.algo(auto_start_proxy=True)
    async def one_pass(*, store: agl.LightningStore, llm_proxy: agl.LLMProxy) -> list[RolloutRecord]:
        await store.add_resources({"llm": llm_proxy.as_resource()})
        made = [await store.enqueue_rollout(task, mode="train") for task in tasks]
        ids = [rollout.rollout_id for rollout in made]
        ended = {each.rollout_id: each for each in await store.wait_for_rollouts(rollout_ids=ids, timeout=60)}
        return [
            read_rollout(ended[one], await store.query_attempts(one), list(await store.query_spans(one))) for one in ids
        ]

    with Engine(answer) as engine:
        proxy = agl.LLMProxy(model_list=[engine.entry("policy")])
        trainer = agl.Trainer(algorithm=one_pass, llm_proxy=proxy, strategy="shm", runner={"concurrency": len(tasks)})
        trainer.fit(games.adventurer)
        assert engine.trouble == []
        return trainer.result, [exchange.request for exchange in engine.calls]


def test_a_model_that_follows_the_walkthrough_gets_the_whole_score_in_one_row(games: Any, folder: Path) -> None:
    [task] = games.make_games(folder, [2])
    commands = walkthrough(task)
    records, requests = run_games(games, [task] * 4, follows(commands))  # side by side, as a group of GRPO
    assert [record.reward for record in records] == [1.0] * 4
    assert [len(record.calls) for record in records] == [len(commands)] * 4
    assert [len(record.samples) for record in records] == [1] * 4
    assert all(not record.exclusions for record in records)
    assert len(requests) == 4 * len(commands)
    assert not any(text in str(requests[-1]["messages"][1::2]) for text in ("$$", ">")), "no banner and no prompt"


def test_a_part_of_the_walkthrough_gets_a_part_of_the_score_and_look_gets_none(games: Any, folder: Path) -> None:
    [task] = games.make_games(folder, [2])
    commands = walkthrough(task)
    [part], _ = run_games(games, [{**task, "turns": len(commands) - 1}], follows(commands))
    assert part.reward == 0.75
    [nothing], requests = run_games(games, [{**task, "turns": 5}], lambda _: "look")
    assert (nothing.reward, len(requests), len(nothing.samples)) == (0.0, 5, 1)


def test_no_reply_of_a_model_ends_the_process_or_accesses_files(
    games: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [task] = games.make_games(folder, [2])
    monkeypatch.chdir(tmp_path)
    replies = ["save", "look then SAVE", "Transcripts", "#restore", "quit", "a\x00b", "", "é", "\n", "x" * 9000]
    task["turns"] = len(replies)
    [record], requests = run_games(games, [task], lambda request: replies[len(request["messages"]) // 2 - 1])
    assert (record.reward, len(record.calls)) == (0.0, len(replies))
    assert str(requests[-1]["messages"]).count("This command is not available.") == 5
    assert list(tmp_path.glob("*")) == []


def test_a_seed_gives_the_same_game_in_another_process_and_another_seed_another(games: Any, folder: Path) -> None:
    first, other = (Path(task["file"]) for task in games.make_games(folder, [2, 3]))
    script = "import sys; from pathlib import Path; from games import make_games; make_games(Path(sys.argv[1]), [2])"
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES / "textworld"), "PYTHONHASHSEED": "5"}
    again = folder / "again"
    subprocess.run([sys.executable, "-c", script, str(again)], env=environment, check=True, capture_output=True)
    assert (again / first.name).read_bytes() == first.read_bytes() != other.read_bytes()
    assert sorted(path.suffix for path in again.glob("*")) == [".json", ".z8"]


def test_the_example_measures_each_kind_of_goal(games: Any, folder: Path) -> None:
    [shown] = re.findall(r"```text\n(.*?)```", (EXAMPLES / "textworld/README.md").read_text(), re.DOTALL)
    plan = follows(walkthrough(games.make_games(folder, [2])[0]))
    with Engine(lambda request: plan(request) if "lettuce" in str(request["messages"][1]) else "look") as server:
        command = [sys.executable, "examples/textworld/measure.py", "--endpoint", server.base_url, "--model", "m"]
        command += ["--folder", str(folder), "--games", "2", "--seed", "2", "--turns", "12", "detailed", "none"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.strip() in done.stdout, done.stderr
