"""The guides of the operator: each command in them is typed here, in the order of the page, on what the page makes."""

from __future__ import annotations

import asyncio
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli import main
from agentlightning.cli.main import load
from agentlightning.store import SQLiteLightningStore
from tests.cli.reference import PAGE, page
from tests.pages import blocks
from tests.stubs.processes import run_program

GUIDES = ("how-to/operate.md", "how-to/debug.md")
SERVING = {"gateway", "prometheus", "runner"}
"""Commands that end when they are told to: their arguments are read, and that is all. `agl store` is another one."""


def commands(guide: str) -> Iterator[list[str]]:
    """Yield the commands of a guide as words, without `agl`."""
    for block in blocks(guide, "bash"):
        for line in block.splitlines():
            words = shlex.split(line)
            if words[0] == "agl":
                yield words[1:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the program of the guide left behind, and a file of the name that the other guide uses."""
    made = tmp_path_factory.mktemp("guide")
    [program] = blocks("how-to/debug.md")
    (made / "program.py").write_text(program)
    assert run_program("python", "program.py", folder=made).stderr.count("succeeded (scored)") >= 2
    shutil.copy(made / "debug.db", made / "run.db")
    return made


def rollout_in(folder: Path) -> str:
    async def first() -> str:
        store = SQLiteLightningStore(folder / "debug.db")
        [rollout, *_] = await store.query_rollouts(limit=1)
        await store.close()
        return rollout.rollout_id

    return asyncio.run(first())


@pytest.mark.parametrize("guide", GUIDES)
def test_each_command_of_a_guide_does_what_it_is_for(
    guide: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for name in ("AGENT_LIGHTNING_STORE_URL", "AGL_TOKEN", "AGL_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    rollout_id = rollout_in(folder)
    typed = 0
    for words in commands(guide):
        words = [rollout_id if word == "$ROLLOUT" else word for word in words]
        if words[0] in SERVING or (words[0] == "store" and words[1].startswith("-")):
            loaded: Any = load(words[0])
            loaded.make_context(words[0], words[1:]).close()
        else:
            assert main(words) == 0, (words, capsys.readouterr().err)
        typed += 1
    assert typed >= 5


def test_the_reference_says_what_the_commands_say() -> None:
    assert PAGE.read_text() == page(), "write it anew: python -m tests.cli.reference"


def test_the_file_of_the_reference_is_understood(tmp_path: Path) -> None:
    [written] = blocks(PAGE, "yaml")
    (tmp_path / "run.yaml").write_text(written)
    (tmp_path / "tasks.jsonl").write_text('"Ada"\n')
    (tmp_path / "my_agent.py").write_text(
        "def agent(task, prompt_template):\n    return float(prompt_template.format(name=task) == 'Hello, Ada!')\n"
    )
    words = ("run", "run.yaml", "--json", "--log-level", "WARNING")
    done = run_program("agl", *words, folder=tmp_path, AGL_LOG_JSON="1")
    assert '"rewards": [\n      1.0\n    ]' in done.stdout
    assert (tmp_path / "run.db").is_file()
