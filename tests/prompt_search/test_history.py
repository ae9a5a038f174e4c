"""Versions as records and as JSON, and read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.chat.bill import BillLine
from agentlightning.prompt_search.history import History, PromptVersion
from agentlightning.training.records import RunLog
from tests.prompt_search.parts import resources


def version(name: str, text: str = "x {question}", **fields: object) -> PromptVersion:
    made = PromptVersion(name, resources(text), "main_prompt")
    for field, value in fields.items():
        setattr(made, field, value)
    return made


@pytest.fixture
async def store() -> agl.LightningStore:
    store = agl.InMemoryLightningStore()
    await store.start_run("r", algorithm="APO", config={}, versions={})
    return store


async def opened(store: agl.LightningStore, run: str = "r", seed: str = "x {question}") -> tuple[History, agl.Bill]:
    history = History(RunLog(store, run))
    return history, await history.open(version("v0", seed))


def test_a_version_goes_through_json() -> None:
    whole = version("v3", parent="v1", round=2, critique="more", state="refused", problems=("bad",), score=0.5)
    whole.interval, whole.tasks, whole.failures = (0.25, 0.75), 8, 1
    whole.bill.add(BillLine("edit", "m", calls=1))
    assert PromptVersion.from_json(json.loads(json.dumps(whole.as_json()))) == whole
    whole.templates["main_prompt"] = agl.SystemPrompt(template="Answer {question}")
    assert PromptVersion.from_json(json.loads(json.dumps(whole.as_json()))) == whole


async def test_what_was_written_down_is_there_for_the_next_start(store: agl.LightningStore) -> None:
    first, _ = await opened(store)
    made = version("v1", "y {question}", parent="v0", round=1)
    made.bill.add(BillLine("edit", "m", calls=2))
    assert await first.recorded([version("v1", parent="v0", round=1)]) == [None]
    await first.record(made)
    second, bill = await opened(store)
    assert bill.calls == 2
    names = second.next_names(2)
    assert names == ["v1", "v2"]
    versions = [version(name, parent="v0", round=1) for name in names]
    assert await second.recorded(versions) == [made, None]


async def test_a_search_that_goes_on_gives_no_name_twice(store: agl.LightningStore) -> None:
    """A version that failed has no record, and one in which something was hidden is not read back."""
    first, _ = await opened(store)
    for name, text in (("v2", "y {question}"), ("v3", "z {question}"), ("v4", "password: hunter2hunter2 {question}")):
        await first.record(version(name, text, parent="v0", round=1))
    second, _ = await opened(store)
    candidates = await second.resume(discard=False)
    assert [each.version for each in candidates] == ["v2", "v3"]
    second.versions.extend(candidates)
    assert second.next_names(2) == ["v5", "v6"]
    await RunLog(store, "r").evaluation(2, "validation of v5", {"rewards": [1.0], "version": "v5"})  # and was killed
    again, _ = await opened(store)
    again.versions.extend(await again.resume(discard=False))
    assert again.next_names(1) == ["v6"]
    third, _ = await opened(store)
    assert await third.resume(discard=True) == []
    assert third.next_names(1) == ["v1"]
    await RunLog(store, "r").evaluation(1, "validation of v1", {"rewards": [1.0], "version": "v1"})
    await (await opened(store))[0].resume(discard=True)
    assert not list(await store.query_run_records("r", kind_in=["evaluation"])), "what v1 earns now is written"


async def test_what_failed_and_forgotten_versions_used_stays_on_the_bill(store: agl.LightningStore) -> None:
    first, _ = await opened(store)
    failed, made = version("v1", parent="v0", round=1, state="failed"), version("v2", "y {question}", round=1)
    failed.bill.add(BillLine("critique", "m", calls=1, retries=2, failed_calls=1))
    made.bill.add(BillLine("edit", "m", calls=2))
    for each in (failed, made, failed):
        await first.record(each)
    second, bill = await opened(store)
    assert (bill.calls, bill.retries, bill.failed_calls) == (4, 4, 2)
    assert [each.version for each in await second.resume(discard=True)] == []
    third, bill = await opened(store)
    assert (bill.calls, bill.retries, bill.failed_calls) == (4, 4, 2), "what was forgotten was paid for"
    assert await third.recorded([version("v1", parent="v0", round=1)]) == [None], "it is asked for again"


async def test_a_round_with_other_parents_is_made_anew(store: agl.LightningStore) -> None:
    first, _ = await opened(store)
    await first.record(version("v1", "y {question}", parent="v0", round=1))
    await first.record(version("v2", "z {question}", parent="v1", round=2))
    second, _ = await opened(store)
    assert (await second.recorded([version("v1", parent="v0", round=1)]))[0] is not None
    assert await second.recorded([version("v2", parent="v0", round=2)]) == [None]
    names_left = [record.name for record in await store.query_run_records("r", kind_in=["prompt"])]
    assert names_left == ["v0", "v1"], "what will be made anew is written anew"


async def test_a_run_that_began_with_another_prompt_is_refused(store: agl.LightningStore) -> None:
    await opened(store)
    with pytest.raises(ValueError, match=r"Run 'r' began with other prompts.*run_id"):
        await opened(store, seed="another {question}")


async def test_a_prompt_that_looks_like_a_secret_is_no_other_prompt(store: agl.LightningStore) -> None:
    """Records hide what looks like a secret: a version that was played is read from what was published, one that was
    not is made anew, and so is one whose published prompts are others; the run goes on."""
    text = "Log in with password: hunter2hunter2 and ask {question}"
    first, _ = await opened(store, seed=text)
    names = ["v1", "v2", "v3"]
    made = [version(name, f"{text} {name}!", parent="v0", round=1) for name in names]
    for each in made:
        await first.record(each)
    llm = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m")
    await store.update_resources("apo-r-v1", {**made[0].templates, "llm": llm})
    await store.update_resources("apo-r-v2", {**made[0].templates, "llm": llm})
    second = History(RunLog(store, "r"), None, lambda name: store.get_resources_by_id(f"apo-r-{name}"))
    await second.open(version("v0", text))
    versions = [version(name, parent="v0", round=1) for name in names]
    assert await second.recorded(versions) == [made[0], None, None]


async def test_without_a_run_nothing_is_written_and_the_file_is(tmp_path: Path) -> None:
    history = History(RunLog(None), tmp_path / "deep")
    await history.open(version("v0"))
    await history.record(version("v1"))
    history.versions.append(version("v1"))
    history.write(best="v1")
    written = json.loads((tmp_path / "deep/history.json").read_text())
    assert (written["best"], [each["version"] for each in written["versions"]]) == ("v1", ["v0", "v1"])
    assert (tmp_path / "deep/history.json").stat().st_mode & 0o77 == 0
