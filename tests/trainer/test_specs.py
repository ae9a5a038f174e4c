"""Whatever is given to the Trainer: it is made, or refused by an error that names the setting and the way out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agentlightning as agl
from agentlightning.errors import AgentLightningError
from agentlightning.litagent import LitAgent
from tests.trainer.parts import PlainRunner, run_tasks

PARTS = ["algorithm", "tracer", "adapter", "store", "runner", "strategy", "llm_proxy", "execution_strategy"]
OTHERS = ["n_runners", "max_rollouts", "initial_resources", "port", "hooks", "reward_fn", "policy_faults"]
OTHERS += ["rollout_config", "run_id", "progress", "n_workers", "max_tasks", "triplet_exporter"]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=3)
names = st.sampled_from(
    ["shm", "SHM", "cs", "grpo", "baselin", "memory", "sqlit", "tests.trainer.parts.run_tasks", "..", "a."]
)
names |= st.sampled_from(
    ["os.path", "os.getpid", "math.pi", "collections.Counter", "tests.nowhere.Thing", "", "\x00.a"]
)
names |= st.sampled_from(["agentlightning.Baseline", "agentlightning.LitAgentRunner", "agentlightning.DummyTracer"])
classes = st.sampled_from(
    [int, dict, LitAgent, agl.Baseline, agl.OtelTracer, PlainRunner, agl.RolloutConfig, ValueError]
)
things = st.sampled_from([run_tasks, len, lambda: 3, lambda x: x, agl.Hook(), agl.OtelTracer(), object(), ..., {1, 2}])
values = scalars | names | classes | things
keys = st.sampled_from(
    ["type", "name", "n_runners", "n_runner", "n_epochs", "model", "max_rollouts", "tracer", "steps"]
)
keys |= st.sampled_from(["server_port", "main_thread", "join_timeout", "timeout_seconds", "concurrency", "num_retries"])
specs = values | st.dictionaries(keys | st.integers(), values, max_size=3) | st.lists(values, max_size=2)


ALIASES = {"execution_strategy": "strategy", "n_workers": "n_runners", "max_tasks": "max_rollouts"}
ALIASES["triplet_exporter"] = "adapter"


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(PARTS + OTHERS), specs, min_size=1, max_size=2))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trainer_is_made_or_refused_by_an_error_that_names_the_setting(arguments: dict[str, Any]) -> None:
    refusal = refusal_of(arguments)
    if refusal is None:
        return
    hints = [*arguments, *(ALIASES[name] for name in arguments if name in ALIASES)]
    hints += [str(key) for spec in arguments.values() if isinstance(spec, dict) for key in spec]
    hints += [repr(spec) for spec in arguments.values() if isinstance(spec, str)]
    assert any(hint in str(refusal) for hint in hints), (
        f"{arguments} was refused with {refusal!r}, which names none of it"
    )


def refusal_of(arguments: dict[str, Any]) -> Exception | None:
    """Return the TypeError, ValueError or error of ours with which a Trainer refuses; None if it is made."""
    try:
        agl.Trainer(**arguments)
    except (TypeError, ValueError, AgentLightningError) as error:
        return error
    return None


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12))
def test_an_unknown_setting_is_refused_with_what_there_is(name: str) -> None:
    refusal = str(refusal_of({name: None}) or f"no setting {name!r}; it has: algorithm")
    assert f"no setting {name!r}" in refusal
    assert "did you mean" in refusal or "it has: algorithm" in refusal or "this is a setting of the" in refusal


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"strategy": {"type": "shm", "n_runner": 2}}, "did you mean 'n_runners'"),
        ({"strategy": {"type": "shm", "join_timeout": "soon"}}, "join_timeout must be a number of seconds; got 'soon'"),
        (
            {"strategy": {"type": "cs", 1: 2}},
            r"strategy dict must have setting names \(strings\) as keys; got the key 1",
        ),
        ({"strategy": "shmm"}, "unknown name 'shmm'.*did you mean 'shm'"),
        ({"strategy": {"typ": "shm"}}, "must have a 'type' key.*its keys are 'typ'"),
        ({"algorithm": {"type": "baseline", "n_epochs": "x"}}, r"algorithm: Baseline\(n_epochs='x'\) failed"),
        ({"algorithm": {"type": "baseline", "n_epoch": 1}}, "no setting 'n_epoch'; did you mean 'n_epochs'"),
        ({"algorithm": "os.path"}, "algorithm: expected a class or another callable; got <module"),
        ({"algorithm": ".."}, r"'\.\.' is not an import path"),
        ({"tracer": {"type": "agentlightning.OtelTracr"}}, "did you mean 'OtelTracer'"),
        ({"reward_fn": 3}, "reward_fn must be callable"),
        ({"reward_fn": dict}, "reward_fn must be a function or a callable object; got the class"),
        ({"run_id": 3}, "run_id must be a string that names the run; got 3"),
        ({"run_id": ""}, "run_id must not be empty"),
        ({"progress": "loud"}, "progress must be one of 'auto', 'live', 'plain', 'none'; got 'loud'"),
    ],
)
def test_the_error_tells_what_would_be_right(settings: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        agl.Trainer(**settings)


# --- nothing has silently no effect ----------------------------------------------------------------------------------


@agl.algo
async def only_store(*, store: agl.LightningStore) -> None:
    """An algorithm that asks for nothing else."""


@agl.algo
async def whole_trainer(*, trainer: agl.Trainer) -> None:
    """An algorithm that reaches everything."""


@pytest.mark.parametrize(
    ("setting", "value"),
    [("adapter", agl.LlmProxyTraceToTriplet), ("initial_resources", {"llm": agl.LLM(endpoint="http://x", model="m")})],
)
def test_a_part_that_the_algorithm_does_not_use_is_refused(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{setting} would have no effect: the algorithm .* does not use it"):
        agl.Trainer(algorithm=only_store, **{setting: value})


def test_a_table_beside_the_one_that_the_algorithm_draws_is_refused() -> None:
    grpo: dict[str, Any] = {"type": "grpo", "model": "tiny", "max_steps": 1}
    with pytest.raises(ValueError, match=r"progress='live' has no effect: GRPO shows its own"):
        agl.Trainer(algorithm=grpo, progress="live")
    agl.Trainer(algorithm={**grpo, "progress": "none"}, progress="live")


def test_a_part_that_the_algorithm_can_reach_is_welcome() -> None:
    for algorithm in (whole_trainer, "baseline"):
        trainer = agl.Trainer(algorithm=algorithm, adapter=agl.LlmProxyTraceToTriplet, initial_resources={})
        assert isinstance(trainer.adapter, agl.LlmProxyTraceToTriplet)
        assert trainer.initial_resources == {}


def test_an_address_that_no_server_will_have_is_refused(caplog: Any, monkeypatch: Any, tmp_path: Any) -> None:
    strategy: dict[str, Any] = {"type": "cs", "server_port": 9999, "server_host": "127.0.0.1"}
    store = f"sqlite:///{tmp_path}/run.db"
    with pytest.raises(ValueError, match="server_host, server_port of the strategy would have no effect"):
        agl.Trainer(strategy={**strategy, "managed_store": False}, store=store)
    monkeypatch.setenv("AGL_MANAGED_STORE", "0")
    agl.Trainer(strategy=strategy, store=store)
    assert "server_host, server_port of the strategy would have no effect" in caplog.text
    agl.Trainer(port=4747, store=store)
    assert "port=4747 has no effect: ClientServerExecutionStrategy runs no store server" in caplog.text
