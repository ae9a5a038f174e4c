"""What type checkers say of a user's programs in `programs/`: pyright in its strict mode and `mypy --strict`.

`# E` marks a line on which both checkers report an error, `# E pyright` one that pyright alone reports; no other line
may have one. `# R: text` marks a `reveal_type` whose answer contains the text, without the modules of its names.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import agentlightning as agl
from tests.typing.editor import Editor

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]
SKIPPED = "torch transformers peft opentelemetry openai anthropic ray fastapi starlette uvicorn psycopg pymongo numpy"
MYPY = f"[mypy]\nstrict = true\n[mypy-{','.join(f'{name}.*' for name in SKIPPED.split())}]\nfollow_imports = skip\n"
PYRIGHT = {"include": [str(PROGRAMS)], "typeCheckingMode": "strict", "pythonVersion": "3.11", "extraPaths": [str(ROOT)]}

Place = tuple[str, int]


class Verdict:
    """The lines with errors, and the types that were revealed."""

    def __init__(self) -> None:
        self.errors: dict[Place, str] = {}
        self.revealed: dict[Place, str] = {}

    def add(self, path: str, line: int, is_error: bool, message: str) -> None:
        place = (Path(path).name, line)
        if is_error:
            self.errors.setdefault(place, message)
        elif match := re.search(r'(?:is|type is) "(.*)"$', message):
            self.revealed[place] = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", match[1])


def pyright(folder: Path) -> Verdict:
    config = folder / "pyrightconfig.json"
    config.write_text(json.dumps(PYRIGHT))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "-p", str(config), "--pythonpath", sys.executable]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    verdict = Verdict()
    for each in report["generalDiagnostics"]:
        line = each["range"]["start"]["line"] + 1
        verdict.add(each["file"], line, each["severity"] == "error", each["message"].splitlines()[0])
    return verdict


def mypy(folder: Path) -> Verdict:
    config = folder / "mypy.ini"
    config.write_text(MYPY)
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(folder / "cache")]
    answer = subprocess.run([*command, *programs()], capture_output=True, text=True, check=False, cwd=ROOT)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    verdict = Verdict()
    for path, line, kind, message in re.findall(r"^(\S+\.py):(\d+): (error|note): (.*)$", answer.stdout, re.MULTILINE):
        verdict.add(path, int(line), kind == "error", message)
    return verdict


def programs() -> list[str]:
    return [str(path) for path in sorted(PROGRAMS.glob("*.py"))]


def marks(pattern: str) -> Mapping[Place, str]:
    """Return the text of each mark of this kind by its place."""
    lines = (
        (Path(name).name, number, line)
        for name in programs()
        for number, line in enumerate(Path(name).read_text().splitlines(), start=1)
    )
    return {(name, number): match[1] for name, number, line in lines if (match := re.search(pattern, line))}


@pytest.mark.slow
@pytest.mark.parametrize("checker", [pyright, mypy])
def test_a_program_of_a_user_has_the_errors_that_it_should_have_and_no_other(
    checker: Callable[[Path], Verdict], tmp_path: Path
) -> None:
    verdict = checker(tmp_path)
    expected = marks(r"# E( pyright)?$" if checker is pyright else r"# E()$")
    assert sorted(verdict.errors) == sorted(expected), {
        place: verdict.errors.get(place, "no error") for place in verdict.errors.keys() ^ expected.keys()
    }
    for place, text in marks(r"# R: (.+)$").items():
        assert text in verdict.revealed[place], place


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    folder = tmp_path_factory.mktemp("editor")
    (folder / "pyrightconfig.json").write_text(json.dumps({**PYRIGHT, "include": ["."]}))
    (folder / "program.py").write_text((PROGRAMS / "editor.py").read_text())
    with Editor(folder / "program.py") as open_file:
        yield open_file


@pytest.mark.slow
def test_an_editor_completes_public_names_alone(editor: Editor) -> None:
    of_modules = {name for name in vars(types.ModuleType("module"))} | {"__path__", "__file__", "__cached__"}
    offered = set(editor.completions("print(agl.")) - of_modules - {"__dict__", "__builtins__", "__annotations__"}
    assert offered - {"__version__"} == {name for name in dir(agl) if not name.startswith("_")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("agl.GRPO", ("learning_rate: Positive = 0.00001", "Train the weights of a transformers model")),
        ("settings.learning_rate", ("Positive", "Learning rate of the optimizer")),
        ("settings.step_timeout_seconds", ("Positive", "Seconds")),
        ("settings.max_completion_length", ("Count", "tokens")),
        (".fit", ("train_dataset", "Run the algorithm")),
        ("enqueue_rollout", ("TaskInput", "seconds", "Raises")),
    ],
)
def test_an_editor_shows_the_default_and_the_meaning(editor: Editor, text: str, shown: tuple[str, ...]) -> None:
    answer = editor.hover(text)
    assert [word for word in shown if word not in answer] == [], answer
