"""`agl promote` and `agl compare` as a shell runs them: exit codes for CI, reasons, JSON, and a page for people."""

from __future__ import annotations

import asyncio
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli import main
from agentlightning.types.runs import RunRecord
from tests.cli.terminal import shell
from tests.evaluation.parts import SECRET, agent, evaluated, tasks_of_levels


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """A store with the runs of three prompts, one without an evaluation, and one of other tasks."""
    folder = tmp_path_factory.mktemp("runs")
    prompts = ("easy odd", "easy hard odd", "hard")
    runs = {prompt: evaluated(folder / "agl.db", prompt).run_id or "" for prompt in prompts}
    runs["other"] = evaluated(folder / "agl.db", "easy", tasks=3).run_id or ""

    @agl.algo
    async def asks(*, run: Any, store: Any) -> None:
        await run.step(1, {"mean_reward": 0.5})

    agl.Trainer(
        store=agl.SQLiteLightningStore(folder / "agl.db"), strategy="shm", algorithm=asks, run_id="steps-only"
    ).fit(lambda task: 1.0)
    return str(folder / "agl.db"), runs


def test_a_better_candidate_is_promoted_with_exit_code_0(place: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    store, runs = place
    page = tmp_path / "report.html"
    words = ("promote", runs["easy odd"], runs["easy hard odd"], "--report", page, "--store", store)
    done = shell(*words, SOME_API_KEY=SECRET)  # it knows the secret from its environment
    assert (done.returncode, done.stderr) == (0, "")
    assert "promoted: better: 12 tasks gained, 0 lost of 40 pairs" in done.stdout
    assert f"report written to {page}" in done.stdout
    assert page.stat().st_mode & 0o77 == 0
    text = page.read_text()
    assert "Promoted:" in text
    assert SECRET not in text
    assert "[hidden]" in text
    assert text.count("<details") == 10  # of 12


def test_a_worse_one_is_not_with_exit_code_1_and_the_reason_of_each_rule(
    place: tuple[str, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    store, runs = place
    limits = ("--floor", "short=0.9", "--json", "--store", store)
    assert main(["promote", runs["easy hard odd"], runs["hard"], *limits]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["promoted"] is False
    failed = {rule["rule"]: rule["reason"] for rule in report["rules"] if not rule["passed"]}
    assert set(failed) == {"better", "slices", "floor short"}
    assert "worse slices: level=easy, level=odd" in failed["slices"]
    assert [each["evaluation"] for each in report["evaluations"]] == ["evaluation", "evaluation"]
    assert report["comparison"]["lost"] == 24


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["easy odd", "steps-only"], "cannot be compared task by task: it has no evaluation. Record an evaluation"),
        (["easy odd", "easy odd"], "is given twice"),
        (["easy odd", "nobody"], "Run 'nobody' not found"),
        (["easy odd", "hard", "--floor", "short"], "--floor: expected NAME=VALUE, such as accuracy=0.8; got 'short'"),
        (["easy odd", "hard", "--floor", "a=1", "--floor", "a=2"], "set twice for 'a'"),
        (["easy odd", "hard", "--floor", "shrot=1"], "did you mean 'short'?"),
        (["easy odd", "hard", "--significance", "5"], "significance=5.0 must be between 0 and 1"),
        (["easy odd", "hard", "--evaluation", "held_out"], "expected one of: evaluation"),
        (["easy odd", "hard", "--report", "/dev/null/report.html"], "Cannot write the report '/dev/null/report.html'"),
    ],
)
def test_wrong_input_is_exit_code_2_and_one_line(
    words: list[str], message: str, place: tuple[str, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    store, runs = place
    code = main(["promote", *(runs.get(word, word) for word in words), "--store", store])
    assert code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_agl_compare_is_agl_runs_compare(
    place: tuple[str, dict[str, str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store, runs = place
    outputs: list[str] = []
    for words in (["compare"], ["runs", "compare"]):
        assert main([*words, runs["easy odd"], runs["easy hard odd"], "--store", store]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert "better: 12 tasks gained" in outputs[0]
    page = tmp_path / "report.html"
    assert main(["compare", runs["easy odd"], runs["hard"], "--store", store, "--report", str(page)]) == 0
    assert "Promoted" not in page.read_text()


def test_runs_without_common_tasks_are_compared_as_far_as_they_go(
    place: tuple[str, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    store, runs = place
    assert main(["compare", runs["easy odd"], "steps-only", "--store", store]) == 0
    assert "no evaluation to compare: run steps-only cannot be compared" in capsys.readouterr().out
    assert main(["compare", runs["easy odd"], runs["other"], "--store", store, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["evaluations"][-1]["shared_tasks"] == 3


def test_runs_of_two_kinds_are_judged_by_the_tasks_that_they_share(tmp_path: Path) -> None:
    """A smoke test with one prompt, and an evaluation with another."""
    store = str(tmp_path / "agl.db")
    prompt: Any = {"prompt": agl.PromptTemplate(template="easy", engine="f-string")}
    trainer = agl.Trainer(
        store=agl.SQLiteLightningStore(store),
        strategy="shm",
        algorithm="baseline",
        initial_resources=prompt,
        run_id="b",
    )
    trainer.fit(agent, val_dataset=tasks_of_levels(40))
    candidate = evaluated(store, "easy hard odd").run_id or ""
    page = tmp_path / "report.html"
    assert main(["promote", "b", candidate, "--store", store, "--report", str(page)]) == 0
    text = page.read_text()
    assert "baseline after step 0, 40 tasks" in text
    assert "no rollout" not in text  # both sides have their conversations
    assert text.count("my key is") == 20


class Page(HTMLParser):
    """The tags of a page, and the addresses that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in ("meta", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "circle", "polyline"):
            assert self.open.pop() == tag


async def draw(store: str, runs: dict[str, str]) -> None:
    opened = agl.SQLiteLightningStore(store)
    for name, gain in (("easy odd", 0.0), ("hard", 0.5)):
        steps = [RunRecord(kind="step", step=step, data={"mean_reward": step / 40 + gain}) for step in range(1, 21)]
        await opened.add_run_records(runs[name], steps)
    await opened.close()


def test_the_page_obeys_nobody_needs_nothing_and_draws_the_curve(
    place: tuple[str, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, runs = place
    asyncio.run(draw(store, runs))
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    page = tmp_path / "report.html"
    assert main(["promote", runs["easy odd"], runs["hard"], "--report", str(page), "--store", store]) == 1
    text = page.read_text()
    read = Page()
    read.feed(text)
    read.close()
    assert read.open == []
    assert read.tags.isdisjoint({"script", "img", "link", "iframe", "object", "a", "form"})
    assert read.attributes.isdisjoint({"src", "href", "onerror", "onload", "action", "style"})
    assert not re.search(r"https?://|url\(|@import", text)
    assert "default-src 'none'" in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "{{ 7 * 7 }}" in text
    assert "\u202e" not in text
    assert "\x00" not in text
    assert text.count("<polyline") == 2
    assert {"Tasks gained (12)", "Tasks lost (24)"} <= set(re.findall(r"<h2>(\w+ \w+ \(\d+\))</h2>", text))
    assert "Not promoted:" in text
    assert SECRET not in text
