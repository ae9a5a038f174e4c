"""The page `docs/how-to/any-program.md`: each of its programs runs and does what the page says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.store.sqlite import SQLiteLightningStore
from tests.pages import DOCS, blocks
from tests.stubs.model_server import ModelServer
from tests.stubs.processes import run_program

PAGE = "how-to/any-program.md"
ADDRESS = "http://127.0.0.1:8000/v1"


def named(language: str, name: str) -> str:
    [block] = [block for block in blocks(PAGE, language) if block.partition("\n")[0].endswith(f" {name}")]
    return block


def run_page(folder: Path, model: ModelServer, command: str) -> Any:
    """Run the page's Python program on its agents and return the spans that it left in a store."""
    program = named("python", "try_it.py").replace(ADDRESS, model.entry("policy")["litellm_params"]["api_base"])
    program = program.replace('["bash", "agent.sh"]', command).replace('strategy="shm"', 'strategy="shm", store=STORE')
    (folder / "agent.sh").write_text(named("bash", "agent.sh"))
    (folder / "agent.mjs").write_text(named("javascript", "agent.mjs"))
    (folder / "try_it.py").write_text(program.replace("\n\n", "\n\nSTORE = 'sqlite:///store.db'\n\n", 1))
    run_program("python", "try_it.py", folder=folder)


async def looked_at(folder: Path) -> tuple[str, float | None]:
    store = SQLiteLightningStore(folder / "store.db")
    [rollout] = await store.query_rollouts()
    reward = agl.find_final_reward(list(await store.query_spans(rollout.rollout_id)))
    await store.close()
    assert rollout.status == "succeeded"
    return rollout.rollout_id, reward


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_the_shell_script_of_the_page_is_scored_and_what_it_said_can_be_looked_at(tmp_path: Path) -> None:
    with ModelServer(answer=lambda request: "Paris, of course") as model:
        run_page(tmp_path, model, '["bash", "agent.sh"]')
    rollout_id, reward = await looked_at(tmp_path)
    assert reward == 1.0
    command = next(block for block in blocks(PAGE, "bash") if block.startswith("agl rollouts show"))
    words = command.replace("ro-a1bbd7f90ae7", rollout_id).replace("runs/20260101-120000", "store.db").split()
    assert "the model said: " in run_program(*words, folder=tmp_path).stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node (Debian package nodejs)")
async def test_the_node_program_of_the_page_is_scored(tmp_path: Path) -> None:
    with ModelServer(answer=lambda request: "Rome") as model:
        run_page(tmp_path, model, '["node", "agent.mjs"]')
    assert (await looked_at(tmp_path))[1] == 0.0


def test_the_settings_of_the_page_are_accepted_and_its_judge_judges() -> None:
    for block in blocks(PAGE):
        if "try_it.py" in block:
            continue
        names: dict[str, Any] = {}
        exec(compile(block, "any-program.md", "exec"), names)
        assert isinstance(names["agent"], agl.CommandAgent)
        if "judge" in names:
            output = agl.ProgramOutput(exit_code=0, stdout="it is 42", stderr="", seconds=0.1)
            assert names["judge"](output, {"answer": "42"}) == 1.0


def test_the_page_names_every_variable_that_a_program_finds_and_no_other() -> None:
    from agentlightning.litagent.command import attempt_folder as program_env

    text = (DOCS / PAGE).read_text()
    table = text[text.index("## Environment variables") : text.index("If there are several models")]
    matches = set(re.findall(r"`([A-Z][A-Z_]+)`", table))
    assert matches == {*program_env.PASSED, *program_env.RESERVED}
