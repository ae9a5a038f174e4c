"""Each tracker on the real package, offline: what a run told is read back from what the package wrote.

Needs the four packages: `make test-trackers` runs it in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.trackers.parts import SECRET, run

PACKAGES = ("tensorboard", "wandb", "mlflow", "swanlab")


def needs(package: str) -> pytest.MarkDecorator:
    spec = importlib.util.find_spec(package)
    return pytest.mark.skipif(spec is None or spec.origin is None, reason=f"needs the package {package}")


pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of the packages' own
]

LOSSES = [(1, 1.0), (2, 0.5), (3, 0.3333)]


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory and a home of the test's own, a secret in the environment, and nobody outside to be asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MY_API_KEY", SECRET)
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    connect = socket.socket.connect

    def only_here(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            addresses.append(address)
            raise OSError("no network in this test")
        connect(self, address)

    addresses: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", only_here)
    yield
    assert addresses == []


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return agl.SQLiteLightningStore(tmp_path / "agl.db")


def told_secret(folder: Path) -> list[Path]:
    """Files below the folder that hold the secret."""
    return [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def _tensorboard(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), purge_orphaned_data=True).Reload()


def _text(accumulator: Any, tag: str) -> str:
    return accumulator.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()


@needs("tensorboard")
def test_tensorboard_shows_curves_texts_and_the_end(tmp_path: Path) -> None:
    run({"type": "tensorboard", "log_dir": str(tmp_path / "tb")})
    accumulator = _tensorboard(tmp_path / "tb/run-1")
    assert [(event.step, round(event.value, 4)) for event in accumulator.Scalars("update/loss")] == LOSSES
    assert [event.value for event in accumulator.Scalars("evaluation/held_out")] == [0.75]
    assert [(event.step, event.value) for event in accumulator.Scalars("alarm/equal_rewards")] == [(2, 1.0), (3, 0.0)]
    assert '"rate": 0.5' in _text(accumulator, "config")
    assert _text(accumulator, "alarms/equal_rewards") == "step 3: equal_rewards (over): no longer."
    assert _text(accumulator, "checkpoints") == "step 3: runs/x/checkpoint-3"
    assert _text(accumulator, "prompts/v1") == "step 1: v1: be kind"
    assert "- state: succeeded\n- model_path: runs/x/model\n- best: 0.75" in _text(accumulator, "ending")
    assert told_secret(tmp_path / "tb") == []


@needs("tensorboard")
def test_a_run_that_goes_on_is_the_same_run_of_tensorboard_and_a_step_taken_anew_is_there_once(
    tmp_path: Path, store: Any
) -> None:
    tracker = {"type": "tensorboard", "log_dir": str(tmp_path / "tb")}
    run(tracker, store=store, steps=2)
    run(tracker, store=store, steps=4)
    assert [path.name for path in (tmp_path / "tb").iterdir()] == ["run-1"]
    accumulator = _tensorboard(tmp_path / "tb/run-1")
    assert [event.step for event in accumulator.Scalars("mean_reward")] == [1, 2, 3, 4]

    from agentlightning.trackers import TensorBoardTracker
    from agentlightning.types.runs import RunRecord

    again = TensorBoardTracker(tmp_path / "tb")
    again.start(agl.TrackedRun("run-1", resumed=True))
    again.record(RunRecord(kind="step", step=3, data={"mean_reward": 9.0}))
    again.finish(agl.RunEnding("succeeded"))
    accumulator = _tensorboard(tmp_path / "tb/run-1")
    rewards = [(event.step, round(event.value, 4)) for event in accumulator.Scalars("mean_reward")]
    assert rewards == [(1, 0.1), (2, 0.2), (3, 9.0)]


# --- Weights & Biases ------------------------------------------------------------------------------------------------


def _wandb(folder: Path) -> list[Any]:
    from tests.trackers.wandb_file import records

    return [record for file in sorted(folder.rglob("offline-run-*/*.wandb")) for record in records(file)]


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@needs("wandb")
def test_wandb_has_history_summary_settings_and_alerts(tmp_path: Path) -> None:
    run({"type": "wandb", "mode": "offline", "project": "mine", "folder": str(tmp_path / "wb")})
    records = _wandb(tmp_path / "wb")
    [about] = [r.run for r in records if r.HasField("run")]
    assert (about.run_id, about.display_name, about.project) == ("run-1", "run-1", "mine")
    config = _items(about.config.update)
    assert config["algorithm"]["rate"] == 0.5
    assert config["algorithm_name"] == "Recording"
    history = [_items(r.history.item) for r in records if r.HasField("history")]
    losses = [(row["step"], round(row["update/loss"], 4)) for row in history if "update/loss" in row]
    assert losses == LOSSES
    assert [row["evaluation/held_out"] for row in history if "evaluation/held_out" in row] == [0.75]
    summary: dict[str, Any] = {}
    for record in records:
        if record.HasField("summary"):
            summary |= _items(record.summary.update)
    assert summary["ending/state"] == "succeeded"
    assert summary["ending/model_path"] == "runs/x/model"
    assert summary["alarms/equal_rewards"] == "step 3: equal_rewards (over): no longer."
    alerts = [r.alert for r in records if r.HasField("alert")]
    assert [alert.title for alert in alerts] == ["equal_rewards (step 2)"]
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [0]
    assert told_secret(tmp_path / "wb") == []


@needs("wandb")
def test_a_run_that_goes_on_has_the_same_id_at_wandb_and_one_that_fails_says_so(tmp_path: Path, store: Any) -> None:
    tracker = {"type": "wandb", "mode": "offline", "folder": str(tmp_path / "wb")}
    run(tracker, store=store, steps=2)
    with pytest.raises(ValueError, match="the model is gone"):
        run(tracker, store=store, steps=3, fails=True)
    records = _wandb(tmp_path / "wb")
    assert {r.run.run_id for r in records if r.HasField("run")} == {"run-1"}
    history = [_items(r.history.item) for r in records if r.HasField("history")]
    assert sorted(row["step"] for row in history if "mean_reward" in row) == [1, 2, 3]
    assert sorted(r.exit.exit_code for r in records if r.HasField("exit")) == [0, 1]
    assert told_secret(tmp_path / "wb") == []


# --- MLflow ----------------------------------------------------------------------------------------------------------


def _mlflow(tmp_path: Path) -> tuple[dict[str, str], Any]:
    settings = {"tracking_uri": f"sqlite:///{tmp_path / 'ml.db'}", "artifact_location": f"file://{tmp_path / 'art'}"}
    from mlflow.tracking import MlflowClient

    return {"type": "mlflow", **settings}, MlflowClient(settings["tracking_uri"])


@needs("mlflow")
def test_mlflow_has_parameters_metrics_tags_and_the_status(tmp_path: Path) -> None:
    tracker, client = _mlflow(tmp_path)
    run(tracker)
    place = client.get_experiment_by_name("agentlightning").experiment_id
    [stored_run] = client.search_runs([place])
    assert (stored_run.info.run_name, stored_run.info.status) == ("run-1", "FINISHED")
    assert stored_run.data.params["algorithm/rate"] == "0.5"
    losses = client.get_metric_history(stored_run.info.run_id, "update/loss")
    assert [(metric.step, round(metric.value, 4)) for metric in losses] == LOSSES
    assert stored_run.data.metrics["evaluation/held_out"] == 0.75
    tags = stored_run.data.tags
    assert tags["agl.run_id"] == "run-1"
    assert (tags["agl.state"], tags["agl.model_path"], tags["agl.best"]) == ("succeeded", "runs/x/model", "0.75")
    assert tags["alarm.equal_rewards"] == "step 3: equal_rewards (over): no longer."
    [config] = tmp_path.glob("art/*/artifacts/config.json")
    assert json.loads(config.read_text())["config"]["algorithm"]["rate"] == 0.5
    assert told_secret(tmp_path) == []


@needs("mlflow")
def test_a_run_that_goes_on_is_the_same_run_of_mlflow_whatever_its_name(tmp_path: Path, store: Any) -> None:
    tracker, client = _mlflow(tmp_path)
    name = "it's `a` \\ run/1"
    run(tracker, store=store, steps=2, run_id=name)
    run(tracker, store=store, steps=4, run_id=name)
    place = client.get_experiment_by_name("agentlightning").experiment_id
    [stored_run] = client.search_runs([place])
    assert [metric.step for metric in client.get_metric_history(stored_run.info.run_id, "mean_reward")] == [1, 2, 3, 4]
    assert stored_run.info.status == "FINISHED"
    assert stored_run.data.params["algorithm/steps"] == "2"
    assert stored_run.data.tags["changed.algorithm/steps"] == "4"
    with pytest.raises(ValueError, match="the model is gone"):
        run(tracker, store=store, fails=True, run_id="other")
    assert sorted(one.info.status for one in client.search_runs([place])) == ["FAILED", "FINISHED"]
    assert told_secret(tmp_path) == []


# --- SwanLab ---------------------------------------------------------------------------------------------------------


def _swanlab(folder: Path) -> list[Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    records: list[Any] = []
    for file in sorted(folder.rglob("*.swanlab")):
        reader = DataStoreReader()
        reader.open(str(file))
        for content in reader:
            record = Record()
            record.ParseFromString(content)
            records.append(record)
    return records


@needs("swanlab")
def test_swanlab_has_scalars_texts_and_the_end(tmp_path: Path) -> None:
    run({"type": "swanlab", "mode": "offline", "folder": str(tmp_path / "sw")})
    records = _swanlab(tmp_path / "sw")
    [start] = [r.start for r in records if r.HasField("start")]
    assert (start.name, start.id, start.project) == ("run-1", "run-1", "agentlightning")
    scalars: dict[str, list[Any]] = {}
    for record in records:
        if record.HasField("scalar"):
            point = (record.scalar.step, round(record.scalar.value.number, 4))
            scalars.setdefault(record.scalar.key, []).append(point)
    assert scalars["update/loss"] == LOSSES
    assert scalars["evaluation/held_out"] == [(2, 0.75)]
    assert scalars["alarm/equal_rewards"] == [(2, 1.0), (3, 0.0)]
    texts = {
        (record.media.key, record.media.step): next((tmp_path / "sw").rglob(item.filename)).read_text()
        for record in records
        if record.HasField("media")
        for item in record.media.value.items
    }
    assert texts["alarms/equal_rewards", 3] == "step 3: equal_rewards (over): no longer."
    assert texts["checkpoints/last", 3] == "step 3: runs/x/checkpoint-3"
    assert texts["ending", 3].startswith("state: succeeded\nmodel_path: runs/x/model\nbest: 0.75")
    [config] = (tmp_path / "sw").rglob("config.yaml")
    assert "rate:" in config.read_text()
    assert [r.finish.error for r in records if r.HasField("finish")] == [""]
    assert told_secret(tmp_path / "sw") == []
    assert not any(socket.gethostname() in path.read_text() for path in (tmp_path / "sw").rglob("*metadata.json"))


@needs("swanlab")
def test_a_run_that_goes_on_has_the_same_id_at_swanlab_and_one_that_fails_says_why(tmp_path: Path, store: Any) -> None:
    tracker = {"type": "swanlab", "mode": "offline", "folder": str(tmp_path / "sw")}
    run(tracker, store=store, steps=2)
    with pytest.raises(ValueError, match="the model is gone"):
        run(tracker, store=store, steps=3, fails=True)
    records = _swanlab(tmp_path / "sw")
    assert [r.start.id for r in records if r.HasField("start")] == ["run-1", "run-1"]
    steps = [r.scalar.step for r in records if r.HasField("scalar") and r.scalar.key == "mean_reward"]
    assert sorted(steps) == [1, 2, 3]
    assert sorted(r.finish.error[:27] for r in records if r.HasField("finish")) == ["", "ValueError: the model is go"]
    assert told_secret(tmp_path / "sw") == []


def test_the_environment_of_the_tests_has_all_four_packages() -> None:
    if not os.environ.get("TRACKERS"):
        pytest.skip("only make test-trackers promises them")
    assert [name for name in PACKAGES if importlib.util.find_spec(name) is None] == []
