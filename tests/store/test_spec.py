"""One string names a store; a wrong one gets an error with the right form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import BadRequestError, MissingExtraError
from agentlightning.store import InMemoryLightningStore, LightningStoreClient, SQLiteLightningStore
from agentlightning.store.spec import FORMS, is_store_spec, public_form, spec_of, store_from_spec


class Made:
    """Stands for a database's store class: records the arguments that it was made with."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.args, self.settings = args, settings

    def connect(self) -> None:
        """Connect to nothing."""


@pytest.fixture
def databases(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pymongo")
    pytest.importorskip("psycopg")
    monkeypatch.setattr("agentlightning.store.mongo.MongoLightningStore", Made)
    monkeypatch.setattr("agentlightning.store.postgres.PostgresLightningStore", Made)


# --- the forms -------------------------------------------------------------------------------------------------------


async def test_a_string_names_a_store_in_memory_in_a_file_or_behind_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for spec, kind in {
        "memory": InMemoryLightningStore,
        "sqlite:///run.db": SQLiteLightningStore,
        f"sqlite:///{tmp_path}/absolute.db": SQLiteLightningStore,
        "http://127.0.0.1:4747": LightningStoreClient,
        "https://store.example.org": LightningStoreClient,
    }.items():
        store = store_from_spec(spec)
        assert type(store) is kind
        await store.close()
    assert set(os.listdir(tmp_path)) == {"run.db", "absolute.db"}


def test_a_store_is_returned_as_it_is() -> None:
    store = InMemoryLightningStore()
    assert store_from_spec(store) is store
    with pytest.raises(TypeError, match="already exists; pass lease_seconds when you create it"):
        store_from_spec(store, lease_seconds=1.0)


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        ("mongodb://127.0.0.1:27017", {"mongo_uri": "mongodb://127.0.0.1:27017"}),
        (
            "mongodb://user:pw@a:1,b:2/my%20runs?replicaSet=rs0&partition=team-a&tls=true",
            {
                "mongo_uri": "mongodb://user:pw@a:1,b:2/my%20runs?replicaSet=rs0&tls=true",
                "partition_id": "team-a",
            },
        ),
        ("mongodb+srv://cluster.example.org/runs", {"mongo_uri": "mongodb+srv://cluster.example.org/runs"}),
    ],
)
def test_a_mongodb_uri_keeps_what_is_its_drivers(databases: None, spec: str, settings: dict[str, Any]) -> None:
    made: Any = store_from_spec(spec)
    assert made.settings == settings


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_a_postgresql_uri_keeps_what_is_its_drivers(databases: None, scheme: str) -> None:
    made: Any = store_from_spec(f"{scheme}://u:p@h:5432/db?sslmode=require&lease_seconds=5&partition=x&keep_last=9")
    assert made.args == (f"{scheme}://u:p@h:5432/db?sslmode=require",)
    assert made.settings.pop("retention").keep_last == 9
    assert made.settings == {"lease_seconds": 5.0, "partition": "x"}


@pytest.mark.parametrize(
    ("package", "spec", "extra"),
    [("pymongo", "mongodb://127.0.0.1/x", "mongo"), ("psycopg", "postgresql://127.0.0.1/x", "postgres")],
)
def test_a_driver_that_is_not_installed_is_named_with_the_command_that_installs_it(
    package: str, spec: str, extra: str
) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from agentlightning.errors import MissingExtraError\n"
        "from agentlightning.store.spec import store_from_spec\n"
        f"try: store_from_spec({spec!r})\n"
        "except MissingExtraError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert f"'{package}'" in done.stdout, done.stderr
    assert f"pip install 'agl-framework[{extra}]'" in done.stdout
    assert issubclass(MissingExtraError, ImportError)


# --- settings --------------------------------------------------------------------------------------------------------


async def test_settings_follow_a_question_mark(tmp_path: Path) -> None:
    store: Any = store_from_spec(
        f"sqlite:///{tmp_path}/x.db?synchronous=NORMAL&lease_seconds=4&keep_last=2&max_age=1e3"
    )
    again = dict(store.__reduce__()[0].keywords)
    await store.close()
    policy = again.pop("retention")
    assert (policy.keep_last, policy.max_age, policy.max_bytes) == (2, 1000.0, None)
    assert (again["synchronous"], again["lease_seconds"]) == ("NORMAL", 4.0)
    bounded = store_from_spec("memory?max_span_bytes=4096")
    assert (await bounded.statistics())["eviction_threshold_bytes"] == 4096


async def test_settings_may_also_be_given_beside_the_string() -> None:
    store = store_from_spec("memory", max_span_bytes=4096)
    assert (await store.statistics())["eviction_threshold_bytes"] == 4096
    with pytest.raises(BadRequestError, match="lease_seconds is set twice: in 'memory' and as an argument"):
        store_from_spec("memory?lease_seconds=1", lease_seconds=2.0)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("sqlite:///x.db?synchronus=FULL", "no setting 'synchronus'; did you mean 'synchronous'"),
        ("sqlite:///x.db?journal=wal", "no setting 'journal'; it has: lease_seconds, keep_last, max_age, max_bytes"),
        ("sqlite:///x.db?synchronous=OFF", "must be 'FULL' or 'NORMAL'; got 'OFF'"),
        ("memory?keep_last=many", "keep_last='many' in a store's settings: expected a whole number"),
        ("memory?keep_last=-1", "keep_last=-1"),
        ("memory?keep_last=1&keep_last=2", "keep_last is set twice"),
        ("memory?lease_seconds=nan", "expected a number"),
        ("memory?lease_seconds=inf", "expected a number"),
        ("memory?lease_seconds=", "expected a number"),
        ("memory?lease_seconds=0", "lease_seconds must be positive"),
        ("mongodb://h/d?partitions=a", "no setting 'partitions'; did you mean 'partition'"),
        ("postgresql://h/d?keep_lst=2", "no setting 'keep_lst'; did you mean 'keep_last'"),
        ("http://127.0.0.1:1?retries=2", "no setting 'retries'; it has: deadline"),
    ],
)
def test_a_wrong_setting_is_named(spec: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRequestError) as caught:
        store_from_spec(spec)
    assert text in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_belongs_to_the_store_is_refused_for_a_client_of_it() -> None:
    with pytest.raises(BadRequestError, match="served by another process; pass lease_seconds to that process"):
        store_from_spec("http://127.0.0.1:4747", lease_seconds=1.0)


# --- wrong strings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("sqlite://run.db", "sqlite:///run.db"),
        ("sqlite:run.db", "sqlite:///run.db"),
        ("sqlite:/var/run.db", "sqlite:////var/run.db"),
        ("sqllite:///run.db", "sqlite:///run.db"),
        ("sqlite+aiosqlite:///run.db", "sqlite:///run.db"),
        ("sqlite://", "memory"),
        ("sqlite:///:memory:", "memory"),
        ("Memory", "memory"),
        ("memroy", "memory"),
        ("in-memory", "memory"),
        ("sqlite", "sqlite:///run.db"),
        ("run.db", "sqlite:///run.db"),
        ("run.db?synchronous=NORMAL", "sqlite:///run.db"),
        ("run.SQLite3", "sqlite:///run.SQLite3"),
        ("folder/run.db", "sqlite:///folder/run.db"),
        ("mongo://h/db", "mongodb://h/db"),
        ("mongodb:///db", "mongodb://host/database"),
        ("postgress://h/db", "postgres://h/db"),
        ("PostgreSQL://h/db", "postgresql://h/db"),
        ("127.0.0.1:4747", "http://127.0.0.1:4747"),
        ("http:/127.0.0.1:4747", "http://127.0.0.1:4747"),
        ("http://", "http://127.0.0.1:4747"),
    ],
)
def test_a_wrong_string_is_told_the_closest_right_one(wrong: str, right: str) -> None:
    with pytest.raises(BadRequestError, match="is not a store") as caught:
        store_from_spec(wrong)
    assert str(caught.value).endswith(f"did you mean {right!r}?")
    assert right in FORMS or store_from_spec_accepts(right)


def store_from_spec_accepts(spec: str) -> bool:
    try:
        store_from_spec(spec, no_such_setting=1)
    except TypeError:  # it reached the store's class
        return True
    except BadRequestError as error:
        return "no_such_setting" in str(error)
    return False


@pytest.mark.parametrize("wrong", ["redis://localhost:6379", "", "ftp://x"])
def test_a_string_that_is_near_to_none_lists_them_all(wrong: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        store_from_spec(wrong)
    assert str(caught.value) == f"{wrong!r} is not a store; expected one of: {', '.join(FORMS)}"


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        ("mongodb://user:s3cret@h:1,i:2/db?x=y", "mongodb://user:***@h:1,i:2/db"),
        ("postgresql://u:p@ss@h/db?password=s3cret", "postgresql://u:***@h/db"),
        ("https://s3cret@h:1/store", "https://***@h:1/store"),
        ("https://s3cret:@h:1/store", "https://***@h:1/store"),
        ("postgresql://h/db", "postgresql://h/db"),
        ("http://127.0.0.1:4747", "http://127.0.0.1:4747"),
        ("sqlite:///run.db?synchronous=FULL", "sqlite:///run.db"),
    ],
)
def test_what_is_shown_of_a_string_holds_no_password(spec: str, shown: str) -> None:
    assert public_form(spec) == shown


def test_an_error_about_a_string_holds_no_password() -> None:
    with pytest.raises(BadRequestError) as caught:
        store_from_spec("postgress://user:s3cret@host/db?password=s3cret")
    assert "s3cret" not in str(caught.value)


def test_import_paths_are_no_specs_and_all_else_is() -> None:
    assert not is_store_spec("package.module.Store")
    assert not is_store_spec("memory_of_mine.Store")
    files = ("folder/run.db", "folder\\run.db", "run.db", "run.db?keep_last=2", "run.sqlite", "run.sqlite3", "agent.py")
    assert all(is_store_spec(text) for text in (*FORMS, "memory?lease_seconds=1", "sqlite:run.db", *files))


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("agl.db", "sqlite:///agl.db"),
        ("/var/lib/agl.db", "sqlite:////var/lib/agl.db"),
        ("memory", "memory"),
        ("memory?lease_seconds=1", "memory?lease_seconds=1"),
        ("sqlite:run.db", "sqlite:run.db"),
        ("postgresql://h/d", "postgresql://h/d"),
        ("12:30.db", "sqlite:///12:30.db"),
    ],
)
def test_on_a_command_line_a_file_is_a_spec_too(text: str, spec: str) -> None:
    assert spec_of(text) == spec
