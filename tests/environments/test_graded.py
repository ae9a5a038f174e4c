"""`agl.tasks_from`: data sets of every form with a grading function, run by the agent that it returns."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.environments.graded import Grade
from tests.stubs.model_server import ModelServer

ROWS = [{"question": f"{n} and {n}?", "solution": str(2 * n)} for n in range(4)]


def right(task: dict[str, Any], answer: str) -> bool:
    return answer == task["solution"]


def add(request: dict[str, Any]) -> str:
    """A model that adds a number to itself, unless it is 3."""
    number = int(request["messages"][-1]["content"].split()[0])
    return str(2 * number) if number != 3 else "no idea"


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer(add) as server:
        yield server


def rewards(server: ModelServer, graded: Any, **settings: Any) -> list[float | None]:
    """Evaluate an agent and its tasks with the server's model."""
    llm = agl.LLM(endpoint=server.base_url, model="m")
    trainer = agl.Trainer(strategy="shm", initial_resources={"llm": llm}, runner={"concurrency": 4}, **settings)
    return trainer.evaluate(*graded).rewards


class Table:
    """Speaks as a Hugging Face `Dataset` does: a row for an integer, a column for a name."""

    def __getitem__(self, key: int | str) -> Any:
        return [row[key] for row in ROWS] if isinstance(key, str) else ROWS[key]

    def __len__(self) -> int:
        return len(ROWS)


def jsonl(folder: Path) -> Path:
    (folder / "t.jsonl").write_text("\ufeff" + "\n".join(map(json.dumps, ROWS)) + "\n\n", encoding="utf-8")
    return folder / "t.jsonl"


def as_json(folder: Path) -> str:
    (folder / "t.json").write_text(json.dumps(ROWS))
    return str(folder / "t.json")


def parquet(folder: Path) -> Path:
    """Write two files, as Hugging Face does with large data sets, below a folder whose name looks like a column."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (whole := folder / "split=train").mkdir()
    for number, rows in enumerate((ROWS[:3], ROWS[3:])):
        parquet.write_table(pyarrow.Table.from_pylist(rows), whole / f"part-{number}.parquet")
    return whole


def hugging_face(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: make .venv-for-trl/.agl-setup")
    return datasets.Dataset.from_list(ROWS)


FORMS: dict[str, Callable[[Path], Any]] = {
    "list": lambda _: ROWS,
    "iterator": lambda _: iter(ROWS),
    "table": lambda _: Table(),
    "jsonl": jsonl,
    "json": as_json,
    "parquet": parquet,
    "one parquet file": lambda folder: str(parquet(folder) / "part-0.parquet"),
    "datasets": hugging_face,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_set_is_run_and_graded_in_one_call(form: str, server: ModelServer, tmp_path: Path) -> None:
    graded = agl.tasks_from(FORMS[form](tmp_path), right, answer="solution")
    count = 3 if form == "one parquet file" else 4
    assert graded.tasks == ROWS[:count]
    assert rewards(server, graded) == [1.0, 1.0, 1.0, 0.0][:count]
    assert {str(call.request["messages"]) for call in server.calls} == {
        str([{"role": "user", "content": row["question"]}]) for row in ROWS[:count]
    }


PROMPTS: list[tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]]]] = [
    ({"x": "1 and"}, {"prompt": "x", "system": "Add."}, [("system", "Add."), ("user", "1 and")]),
    ({"n": 1, "of": {"m": 1}}, {"prompt": "{n} and {of[m]} {{"}, [("user", "1 and 1 {")]),
    ({"x": [{"role": "user", "content": "0 "}] * 2}, {"prompt": "x"}, [("user", "0 ")] * 2),
]


@pytest.mark.parametrize(("row", "settings", "messages"), PROMPTS)
def test_a_prompt_is_a_column_a_template_or_a_list_of_messages(
    row: dict[str, Any], settings: dict[str, Any], messages: list[tuple[str, str]], server: ModelServer
) -> None:
    graded = agl.tasks_from([row], returns(1.0), **settings)
    assert rewards(server, graded) == [1.0]
    assert [(each["role"], each["content"]) for each in server.calls[0].request["messages"]] == messages


async def slowly(task: Any, answer: str) -> float:
    await asyncio.sleep(0)
    return 0.5


def returns(value: object) -> Grade:
    def grade(task: Any, answer: str) -> object:
        return value

    return grade


def broken(task: Any, answer: str) -> float:
    return task["solutoin"]


GRADES: list[tuple[Any, float | None, str | None]] = [
    (right, 1.0, None),
    (slowly, 0.5, None),
    (returns({"reward": 0.25, "short": 1}), 0.25, None),
    (returns(None), None, "no_reward"),
    (returns("good"), None, "ValueError"),
    (broken, None, "KeyError"),
]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("grade", "reward", "failure"), GRADES)
def test_a_grade_is_a_number_a_dict_or_none_and_a_failure_is_no_reward_of_0(
    grade: Any, reward: float | None, failure: str | None, server: ModelServer
) -> None:
    llm = agl.LLM(endpoint=server.base_url, model="m")
    trainer = agl.Trainer(strategy="shm", initial_resources={"llm": llm})
    result = trainer.evaluate(*agl.tasks_from(ROWS[:1], grade))
    assert result.rewards == [reward]
    assert list(result.failures) == ([] if failure is None else [failure])
    assert result.dimensions == (["reward", "short"] if reward == 0.25 else [])


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ([*ROWS, {"question": "?"}], {"answer": "solution"}, "row 5 of the dataset has no 'solution'; it has 'question'"),
    (ROWS, {"prompt": "{question} {contxt}"}, "has no 'contxt'; it has 'question', 'solution'"),
    (ROWS, {"prompt": "{question"}, "expected '}'"),
    ([{"question": None}], {}, "has no 'question'; it has no values"),
    ([], {}, "the dataset has no rows"),
    (["a", "b"], {}, "row 1 of the dataset must be an object of columns; got 'a'"),
    ({"train": ROWS}, {}, r"pass one of them: source=splits\['train'\]"),
    ("gone.jsonl", {}, "'gone.jsonl' not found. Expected a .json, .jsonl or .parquet file, or a dataset"),
    ("t.jsonl", {}, "t.jsonl, line 3 is not JSON"),
    ("u.jsonl", {}, r"row 2 of u.jsonl must be an object of columns; got \[1\]"),
    ("l.jsonl", {}, "l.jsonl is not UTF-8"),
    (".", {}, "'.' contains no .parquet file"),
]


@pytest.mark.parametrize(("source", "settings", "text"), WRONG)
def test_wrong_data_is_refused_before_a_run_with_what_is_there(
    source: Any, settings: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text('{"question": "a"}\n\n{"question"\n')
    Path("u.jsonl").write_text('{"question": "a"}\n[1]\n')
    Path("l.jsonl").write_bytes(b'{"question": "\xe9"}\n')
    with pytest.raises((ValueError, TypeError), match=text):
        agl.tasks_from(source, right, **settings)


def test_a_grade_must_be_a_function() -> None:
    with pytest.raises(TypeError, match="grade must be a function"):
        agl.tasks_from(ROWS, "exact")  # pyright: ignore[reportArgumentType] -- what a user may pass


def test_parquet_without_pyarrow_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "t.parquet").touch()
    with pytest.raises(ImportError, match=r"requires the package pyarrow, .* pip install pyarrow"):
        agl.tasks_from(tmp_path / "t.parquet", right)


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install pyarrow")
    (tmp_path / "t.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"t\.parquet cannot be read as Parquet"):
        agl.tasks_from(tmp_path / "t.parquet", right)
    with pytest.raises(ValueError, match=r"gone\.parquet cannot be read as Parquet"):
        agl.tasks_from(tmp_path / "gone.parquet", right)


def test_a_small_model_trains_on_them_with_runner_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'agl-framework[grpo]'")
    from tests.algorithm.parts import SMALL, save_untrained_model

    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"model": str(save_untrained_model(tmp_path / "model")), **SMALL}
    trainer = agl.Trainer(algorithm=agl.GRPO(**settings), runner={"concurrency": 4})
    trainer.fit(*agl.tasks_from(ROWS, digits))
    assert [(step.calls_captured, step.calls_excluded) for step in trainer.result.metrics] == [(8, {}), (8, {})]


def digits(task: Any, answer: str) -> float:
    return sum(character.isdigit() for character in answer) / max(1, len(answer))
