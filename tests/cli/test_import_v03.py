"""`agl import-v03` from each place where v0.3 kept its data: all of it is there, once, and what is not is named."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio.to_thread
import pytest

from agentlightning.store import SQLiteLightningStore
from tests.cli.terminal import shell as agl
from tests.legacy.v03.older import Older, older, older_server, unfinished, write_dump
from tests.store.conformance.test_history import everything
from tests.stubs.processes import Terminal
from tests.stubs.running import serving

pytestmark = pytest.mark.heavy

Place = Callable[[Older], Any]


async def imported(place: str, folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the command into a new file, and return its exit code and its report."""
    command = ("import-v03", place, "--store", str(folder / "new.db"), "--json", *arguments)
    done = await anyio.to_thread.run_sync(lambda: agl(*command))
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


async def contents(file: Path) -> Any:
    store = SQLiteLightningStore(file)
    content = await everything(store)
    await store.close()
    return content


@pytest.fixture(params=["mongo", "server", "list", "lines", "one file"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """Puts data of v0.3 into one of its places; says how the command calls it."""
    async with AsyncExitStack() as stack:

        async def put(made: Older) -> list[str]:
            if request.param == "mongo":
                return _in_mongo(request.getfixturevalue("mongo_uri"), made)
            if request.param == "server":
                return [await stack.enter_async_context(older_server(made, failures=1))]
            if request.param == "one file":
                (tmp_path / "old.json").write_text(json.dumps(made))
                return [str(tmp_path / "old.json")]
            return [str(write_dump(tmp_path / "dump", made, lines=request.param == "lines"))]

        yield put


def _in_mongo(uri: str, made: Older, partition: str = "pt-0123456789ab", database: str = "") -> list[str]:
    import pymongo

    database = database or f"older{uuid4().hex[:8]}"
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        for kind, documents in made.items():
            client[database][kind].insert_many([{**each, "partition_id": partition} for each in documents])
    return [f"{uri}/{database}"]


async def test_everything_is_here_as_it_was(place: Place, tmp_path: Path) -> None:
    made = older()
    code, report = await imported(*await place(made), tmp_path)
    assert (code, report["whole"], report["not_carried_over"]) == (0, True, [])
    assert {kind: report[kind]["new"] for kind in ("resources", "rollouts", "attempts", "spans")} == {
        kind: len(made[kind]) for kind in ("resources", "rollouts", "attempts", "spans")
    }
    rollouts, resources = await contents(tmp_path / "new.db")
    for one, (rollout, attempts, spans) in zip(made["rollouts"], rollouts, strict=True):
        for name, value in one.items():
            assert value.items() <= rollout[name].items() if name == "config" else rollout[name] == value, name
        mine = [each for each in made["attempts"] if each["rollout_id"] == one["rollout_id"]]
        for old, new in zip(mine, attempts, strict=True):
            assert old.items() <= new.items()
        assert [(new["outcome"], new["reward"]) for new in attempts] == [
            ("infrastructure_fault", None),
            ("scored", int(one["input"]["q"]) / 8),
        ]
        for old, new in zip([s for s in made["spans"] if s["rollout_id"] == one["rollout_id"]], spans, strict=True):
            assert old.items() <= {**new, "links": [], "events": []}.items()
    assert [(each["resources_id"], each["version"], each["update_time"]) for each in resources] == [
        (each["resources_id"], each["version"], each["update_time"]) for each in made["resources"]
    ]
    checked = await anyio.to_thread.run_sync(lambda: agl("store", "check", "--db", str(tmp_path / "new.db")))
    assert checked.returncode == 0, checked.stdout


async def test_the_same_command_again_finds_everything_there(place: Place, tmp_path: Path) -> None:
    made = older()
    named = await place(made)
    await imported(*named, tmp_path)
    before = await contents(tmp_path / "new.db")
    code, report = await imported(*named, tmp_path)
    assert code == 0
    for kind in ("resources", "rollouts", "attempts", "spans"):
        assert (report[kind]["new"], report[kind]["present"]) == (0, len(made[kind]))
    assert await contents(tmp_path / "new.db") == before


async def test_what_has_not_ended_is_named_or_taken_as_cancelled(place: Place, tmp_path: Path) -> None:
    made = older()
    unfinished(made, 1)
    named = await place(made)
    code, report = await imported(*named, tmp_path)
    assert (code, report["whole"]) == (0, True)
    counts = {(each["kind"], each["reason"]): each["count"] for each in report["not_carried_over"]}
    assert counts == {("rollouts", "not_ended"): 1, ("attempts", "no_rollout"): 2, ("spans", "no_rollout"): 6}
    assert report["not_carried_over"][0]["examples"] == ["ro-000000000001"]
    assert "--unfinished cancel" in report["not_carried_over"][0]["message"]
    code, report = await imported(*named, tmp_path, "--unfinished", "cancel", "--run-id", "old")
    assert (code, report["rollouts"]["new"], report["spans"]["new"]) == (0, 1, 6)
    rollouts, _ = await contents(tmp_path / "new.db")
    rollout, attempts, _ = rollouts[1]
    assert (rollout["status"], rollout["run_id"]) == ("cancelled", "old")
    assert [(each["status"], each["outcome"]) for each in attempts] == [
        ("failed", "infrastructure_fault"),
        ("unresponsive", "cancelled"),
    ]


async def test_what_cannot_be_read_and_what_has_no_place_is_counted_and_named(place: Place, tmp_path: Path) -> None:
    made = older()
    made["rollouts"][0]["owner"] = "team"
    made["rollouts"][1]["config"]["patience"] = 3
    made["rollouts"][2]["status"] = "exploded"
    made["spans"][0]["sequence_id"] = -4
    del made["resources"][0]["version"]
    code, report = await imported(*await place(made), tmp_path)
    assert (code, report["whole"]) == (1, False)
    assert report["dropped_fields"] == {"rollouts.owner": 1, "rollouts.config.patience": 1}
    examples = {
        (each["kind"], each["reason"]): (each["count"], each["examples"][0]) for each in report["not_carried_over"]
    }
    assert examples == {
        ("resources", "unreadable"): (1, "rs-000000000001/?"),
        ("rollouts", "unreadable"): (1, "ro-000000000002"),
        ("attempts", "no_rollout"): (2, "at-00000201"),
        ("spans", "unreadable"): (1, f"ro-000000000000/at-00000001/{1:016x}"),
        ("spans", "no_rollout"): (6, f"ro-000000000002/at-00000201/{1:016x}"),
    }
    for kind in ("resources", "rollouts", "attempts", "spans"):
        tally = report[kind]
        assert tally["read"] == len(made[kind]) == tally["new"] + tally["present"] + tally["left"]


BAD: dict[str, Any] = {
    "no whole number": {"$numberInt": "x"},
    "no number": {"$numberDouble": [1]},
    "infinity as a whole number": {"$numberLong": {"$numberDouble": "Infinity"}},
    "half a character": "\ud800",
    "half a character in a name": {"\ud800": 1},
    "deep": json.loads("[" * 190 + "]" * 190),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("form", ["files", "one file"])
async def test_a_document_that_cannot_be_written_is_named_and_the_others_are_taken(
    bad: str, form: str, tmp_path: Path
) -> None:
    made = older(rollouts=3, spans=2)
    made["rollouts"][0]["input"] = BAD[bad]
    made["attempts"][-1]["metadata"] = {"x": BAD[bad]}
    made["spans"][-1]["attributes"] = {"x": BAD[bad]}
    made["spans"][-1]["span_id"] = "half \ud800"
    made["resources"][0]["resources"] = {"own": {"resource_type": "mine", "x": BAD[bad]}}
    (tmp_path / "old.json").write_text(json.dumps(made))
    place = tmp_path / "old.json" if form == "one file" else write_dump(tmp_path / "dump", made)
    code, report = await imported(str(place), tmp_path)
    named = {
        one["kind"]: one["examples"] for one in report["not_carried_over"] if one["reason"] in ("unreadable", "refused")
    }
    assert code == 1
    assert named["rollouts"] == [made["rollouts"][0]["rollout_id"]]
    assert "attempts" in named
    if bad != "deep":  # resources may be so
        assert named["resources"][0].startswith(made["resources"][0]["resources_id"])
    assert report["rollouts"]["new"] == len(made["rollouts"]) - 1
    table = await anyio.to_thread.run_sync(lambda: agl("import-v03", str(place), "--store", str(tmp_path / "two.db")))
    assert (table.returncode, "Traceback" in table.stderr) == (1, False), table.stderr


async def test_people_are_told_in_a_table(tmp_path: Path) -> None:
    made = older()
    unfinished(made)
    dump = str(write_dump(tmp_path / "dump", made))
    done = agl("import-v03", dump, "--store", str(tmp_path / "new.db"), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "new.db").exists()
    assert "Nothing was written (--dry-run)." in done.stdout
    assert "1 rollout not imported (not_ended): ro-000000000000" in done.stdout
    done = agl("import-v03", dump, "--store", str(tmp_path / "new.db"))
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line and line[0].islower()}
    assert lines["rollouts"] == ["4", "3", "0", "1"]
    assert lines["spans"] == ["24", "18", "0", "6"]
    listed = agl("rollouts", "list", "--store", str(tmp_path / "new.db"))
    assert "ro-000000000001" in listed.stdout


async def test_it_is_written_through_a_server_too(tmp_path: Path) -> None:
    made = older(rollouts=30)
    engine = SQLiteLightningStore(tmp_path / "served.db")
    dump = str(write_dump(tmp_path / "dump", made))
    async with serving(engine) as server:
        done = await anyio.to_thread.run_sync(lambda: agl("import-v03", dump, "--store", server.endpoint))
    assert done.returncode == 0, done.stderr
    assert (await engine.statistics())["total_spans"] == len(made["spans"])
    await engine.close()


async def test_spans_that_a_server_has_dropped_are_counted(tmp_path: Path) -> None:
    made = older()
    async with older_server(made, evicted=("ro-000000000001",)) as address:
        code, report = await imported(address, tmp_path)
    assert report["left_behind"] == {"workers": 1, "rollouts with spans that it had dropped from memory": 1}
    assert (code, report["spans"]["new"]) == (0, 18)


async def test_one_of_several_partitions_is_chosen(mongo_uri: str, tmp_path: Path) -> None:
    database = f"older{uuid4().hex[:8]}"
    [named] = _in_mongo(mongo_uri, older(2), "pt-a", database)
    second = older(3)
    for kind, key in (("rollouts", "rollout_id"), ("attempts", "rollout_id"), ("spans", "rollout_id")):
        for each in second[kind]:
            each[key] = each[key].replace("ro-", "ro-b")
    for each in second["resources"]:
        each["resources_id"] += "b"
    _in_mongo(mongo_uri, second, "pt-b", database)
    refused = agl("import-v03", named, "--store", str(tmp_path / "new.db"))
    assert refused.returncode == 2
    assert "2 partitions" in refused.stderr
    assert "pt-b (rollouts: 3), pt-a (rollouts: 2)" in refused.stderr
    assert not (tmp_path / "new.db").exists()
    code, report = await imported(named, tmp_path, "--partition", "pt-a")
    assert (code, report["rollouts"]["new"]) == (0, 2)
    code, report = await imported(named, tmp_path, "--partition", "all")
    assert (code, report["rollouts"]["new"], report["rollouts"]["present"]) == (0, 3, 2)
    wrong = agl("import-v03", named, "--partition", "pt-c", "--store", str(tmp_path / "new.db"))
    assert wrong.returncode == 2
    assert "has no partition 'pt-c'; it has: pt-b" in wrong.stderr


async def _sizes(file: Path) -> Any:
    store = SQLiteLightningStore(file)
    sizes = await store.statistics()
    await store.close()
    return sizes


def test_a_kill_in_the_middle_loses_nothing(tmp_path: Path, terminal: Terminal) -> None:
    made = older(rollouts=400, spans=10)
    dump = str(write_dump(tmp_path / "dump", made, lines=True))
    file = tmp_path / "new.db"
    chance, killed = random.Random(7), 0
    for _ in range(4):
        running = terminal(["agl", "import-v03", dump, "--store", file])
        while not file.exists() and running.code is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.05, 0.4))
        killed += running.code is None
        running.interrupted(signal.SIGKILL)
        checked = agl("store", "check", "--db", str(file))
        assert checked.returncode == 0, checked.stdout
    assert killed
    done = agl("import-v03", dump, "--store", str(file), "--json")
    assert done.returncode == 0, done.stderr
    sizes = asyncio.run(_sizes(file))
    assert (sizes["total_rollouts"], sizes["total_attempts"], sizes["total_spans"]) == (400, 800, 8000)


def test_ctrl_c_says_that_it_may_go_on(tmp_path: Path, terminal: Terminal) -> None:
    dump = str(write_dump(tmp_path / "dump", older(rollouts=1500, spans=10), lines=True))
    running = terminal(["agl", "import-v03", dump, "--store", "new.db"], apart=True)
    while not (tmp_path / "new.db").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    assert running.interrupted() == 130, running.errors
    assert "Traceback" not in running.errors
    assert "Repeat the command to continue" in running.errors
    assert "rollouts" in running.said


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nowhere.json", "is not a source; expected mongodb://"),
        ("http://127.0.0.1:9", "does not respond"),
        ("mongodb://127.0.0.1:9/x?serverSelectionTimeoutMS=300", "cannot be reached"),
        ("empty", "holds none of resources.json"),
        ("number.json", "holds a int; expected one object of lists"),
        ("broken.json", "is not valid JSON"),
        ("other.json", "holds an object of name, version"),
    ],
)
def test_a_wrong_source_is_one_line_and_makes_no_file(tmp_path: Path, source: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "number.json").write_text("5")
    (tmp_path / "broken.json").write_text('{"rollouts": [')
    (tmp_path / "other.json").write_text('{"name": "x", "version": 1}')
    named = source if "://" in source else str(tmp_path / source)
    done = agl("import-v03", named, "--store", str(tmp_path / "new.db"))
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "new.db").exists()


async def test_a_store_of_this_package_is_no_source(tmp_path: Path) -> None:
    async with serving(SQLiteLightningStore(tmp_path / "mine.db")) as server:
        words = ("import-v03", server.endpoint, "--store", str(tmp_path / "new.db"))
        done = await anyio.to_thread.run_sync(lambda: agl(*words))
    assert done.returncode == 2
    assert "agl store backup" in done.stderr


def test_a_target_that_dies_with_the_process_is_refused(tmp_path: Path) -> None:
    dump = str(write_dump(tmp_path / "dump", older()))
    for target, says in (("memory", "in memory"), (str(tmp_path / "no" / "new.db"), "Store file")):
        done = agl("import-v03", dump, "--store", target)
        assert done.returncode == 2
        assert says in done.stderr
    done = agl("import-v03", dump, "--partition", "p", "--store", str(tmp_path / "new.db"))
    assert done.returncode == 2
    assert "only a MongoDB database has partitions" in done.stderr
