"""The Trainer's constructor: defaults, old names, and errors that name the setting."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.store import LightningStoreClient
from agentlightning.trainer import Trainer as SameTrainer
from tests.stubs.processes import run_program
from tests.trainer.parts import Needy, OwnRunner, PlainRunner, make_store


class AsksTooMuch(agl.Hook):
    def on_rollout_start(self, reward: float) -> None: ...  # type: ignore[override]


def test_the_defaults() -> None:
    trainer = agl.Trainer()
    assert SameTrainer is agl.Trainer
    assert trainer.algorithm is None
    assert trainer.llm_proxy is None
    assert trainer.hooks == ()
    assert trainer.reward_fn is None
    assert (trainer.n_runners, trainer.n_workers, trainer.max_rollouts) == (1, 1, None)
    assert (trainer.port, trainer.worker_id) == (None, None)
    assert type(trainer.tracer) is agl.OtelTracer
    assert type(trainer.adapter) is agl.TracerTraceToTriplet
    assert type(trainer.store) is agl.InMemoryLightningStore
    assert type(trainer.strategy) is agl.ClientServerExecutionStrategy
    assert type(trainer.runner) is agl.LitAgentRunner
    assert trainer.runner.tracer is trainer.tracer
    assert trainer.triplet_exporter is trainer.adapter


def test_settings_are_given_by_name_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        agl.Trainer("baseline")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"n_runner": 2}, TypeError, "no setting 'n_runner'; did you mean 'n_runners'"),
        ({"lr": 1e-3}, TypeError, "no setting 'lr': this is a setting of the algorithm"),
        ({"epochs": 1}, TypeError, "this is a setting of the algorithm"),
        ({"agent": 1}, TypeError, r"pass the agent to fit\(agent"),
        ({"n_runners": 0}, ValueError, "n_runners must be at least 1; got 0"),
        ({"n_runners": -3}, ValueError, "n_runners must be at least 1; got -3"),
        ({"n_runners": True}, TypeError, "n_runners must be a whole number"),
        ({"n_runners": "2"}, TypeError, "n_runners must be a whole number"),
        ({"max_rollouts": 0}, ValueError, "max_rollouts must be at least 1"),
        ({"port": 70000}, ValueError, "port must be at most 65535"),
        ({"hooks": [3]}, TypeError, r"hooks\[0\] is not a Hook: 3"),
        ({"hooks": [agl.Hook]}, TypeError, r"pass an instance: Hook\(\)"),
        ({"hooks": 3}, TypeError, "hooks must be a Hook or a sequence"),
        ({"hooks": AsksTooMuch()}, TypeError, r"AsksTooMuch\.on_rollout_start has the unknown arguments reward"),
        ({"initial_resources": ["a"]}, TypeError, "initial_resources must be a dict"),
        ({"initial_resources": {"llm": "gpt"}}, TypeError, r"initial_resources\['llm'\] must be an agl.LLM"),
        ({"strategy": "thread"}, ValueError, "unknown name 'thread'.* one of 'cs', .*'shm'"),
        (
            {"strategy": "shm", "execution_strategy": "cs"},
            TypeError,
            "strategy='shm' and execution_strategy='cs' are the same setting",
        ),
        ({"algorithm": {"type": "VERL"}}, TypeError, "VERL is missing required settings: config"),
        ({"algorithm": "gpro"}, ValueError, "did you mean 'grpo'"),
        ({"algorithm": Needy}, TypeError, "Needy is missing required settings: rate"),
        ({"store": "redis"}, ValueError, "'redis' is not a store; expected one of: memory, sqlite:///run.db"),
        ({"store": "sqlite:run.db"}, ValueError, "expected one of"),
        ({"tracer": int}, ValueError, "Invalid tracer type: class int"),
        ({"runner": {"type": "tests.trainer.parts.OwnRunner", "concurency": 2}}, TypeError, "mean 'concurrency'"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        agl.Trainer(**settings)


NEEDS = {name: f"{name} is missing required settings: model" for name in ("GRPO", "PPO", "SFT", "TRL", "Tinker")}
NEEDS |= {"VERL": "VERL is missing required settings: config", "GEPA": "GEPA requires a stop condition"}


def test_a_bare_name_with_missing_settings_lists_them() -> None:
    program = (
        "import sys, agentlightning as agl\n"
        f"for name in {list(NEEDS)!r}:\n"
        "    try: agl.Trainer(algorithm=name.lower())\n"
        "    except (TypeError, ValueError) as error: print(str(error).splitlines()[0])\n"
        "print('torch' in sys.modules)"
    )
    done = run_program("python", "-c", program)
    *messages, has_torch = done.stdout.splitlines()
    assert has_torch == "False", done.stderr
    assert [text for text, line in zip(NEEDS.values(), messages, strict=True) if text not in line] == []


@pytest.mark.parametrize("name", ["baseline", "Baseline", "agentlightning.Baseline", {"type": "BASELINE"}])
def test_algorithms_have_short_names_in_any_case(name: Any) -> None:
    assert type(agl.Trainer(algorithm=name).algorithm) is agl.Baseline


# --- strategies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["shm", agl.SharedMemoryExecutionStrategy, {"type": "shm"}])
def test_shared_memory_takes_any_number_of_runners(strategy: Any) -> None:
    trainer = agl.Trainer(strategy=strategy, n_runners=4)
    assert type(trainer.strategy) is agl.SharedMemoryExecutionStrategy
    assert (trainer.strategy.n_runners, trainer.strategy.main_thread) == (4, "algorithm")


def test_the_number_of_runners_of_a_strategy_wins_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    built = agl.ClientServerExecutionStrategy(n_runners=3)
    with caplog.at_level(logging.WARNING, "agentlightning"):
        trainer = agl.Trainer(strategy=built, n_runners=2)
    assert (trainer.n_runners, trainer.n_workers) == (3, 3)
    assert "n_runners=2 has no effect" in caplog.text
    assert agl.Trainer(strategy={"type": "cs", "n_runners": 5}).n_runners == 5


@pytest.mark.parametrize(
    ("strategy", "port"),
    [
        (None, 1234),
        ("cs", 1234),
        ({"type": "cs", "server_port": 9}, 9),
        (agl.ClientServerExecutionStrategy(server_port=9), 1234),
    ],
)
def test_the_port_reaches_a_client_server_strategy_in_every_form(strategy: Any, port: int) -> None:
    assert agl.Trainer(port=1234, strategy=strategy).strategy.server_port == port


def test_a_port_for_shared_memory_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "agentlightning"):
        agl.Trainer(port=1234, strategy="shm")
    assert "port=1234 has no effect: SharedMemoryExecutionStrategy runs no store server" in caplog.text


def test_execution_strategy_is_another_name() -> None:
    assert type(agl.Trainer(execution_strategy="shm").strategy) is agl.SharedMemoryExecutionStrategy


# --- stores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("memory", agl.InMemoryLightningStore),
        ("http://127.0.0.1:4747", LightningStoreClient),
        ("agentlightning.InMemoryLightningStore", agl.InMemoryLightningStore),
        (make_store, agl.InMemoryLightningStore),
    ],
)
def test_stores_have_names(spec: Any, kind: Any, tmp_path: Path) -> None:
    assert type(agl.Trainer(store=spec).store) is kind
    assert type(agl.Trainer(store=f"sqlite:///{tmp_path}/run.db").store) is agl.SQLiteLightningStore


def test_a_managed_strategy_says_that_it_ignores_the_store_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AGENT_LIGHTNING_STORE_URL", "http://127.0.0.1:4747")
    with caplog.at_level(logging.WARNING, "agentlightning"):
        assert type(agl.Trainer().store) is agl.InMemoryLightningStore
    assert "AGENT_LIGHTNING_STORE_URL=http://127.0.0.1:4747 is ignored" in caplog.text


def test_an_unmanaged_store_that_processes_would_not_share_is_refused() -> None:
    with pytest.raises(ValueError, match="each would have its own InMemoryLightningStore"):
        agl.Trainer(strategy={"type": "cs", "managed_store": False})
    agl.Trainer(strategy={"type": "shm", "managed_store": False})


# --- runners ---------------------------------------------------------------------------------------------------------


def test_a_runner_class_takes_what_the_trainer_was_given() -> None:
    trainer = agl.Trainer(runner=OwnRunner, max_rollouts=7, reward_fn=len, policy_faults={ValueError: 0.0})
    assert type(trainer.runner) is OwnRunner
    assert trainer.runner.tracer is trainer.tracer
    assert type(agl.Trainer(runner={"concurrency": 3}).runner) is agl.LitAgentRunner


@pytest.mark.parametrize(
    "settings",
    [
        {"max_rollouts": 3},
        {"reward_fn": len},
        {"reward_dimensions": ["a"]},
        {"policy_faults": {ValueError: 0.0}},
        {"tracer": agl.OtelTracer},
    ],
)
@pytest.mark.parametrize(
    "runner", [agl.LitAgentRunner(agl.OtelTracer()), lambda: agl.LitAgentRunner(agl.OtelTracer()), PlainRunner]
)
def test_a_setting_that_a_runner_would_not_take_is_an_error(runner: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))} of the Trainer would have no effect"):
        agl.Trainer(runner=runner, **settings)


def test_a_ready_made_runner_with_the_same_settings_is_welcome() -> None:
    tracer = agl.OtelTracer()
    runner = agl.LitAgentRunner(tracer, max_rollouts=3)
    assert agl.Trainer(runner=runner, tracer=tracer, max_rollouts=3).runner is runner


# --- old names -------------------------------------------------------------------------------------------------------


def test_old_names_work_and_warn() -> None:
    adapter = agl.LlmProxyTraceToTriplet()
    with pytest.warns(DeprecationWarning, match="is deprecated; use") as warnings:
        trainer = agl.Trainer(n_workers=2, max_tasks=5, triplet_exporter=adapter)
    assert (trainer.n_runners, trainer.max_rollouts, trainer.adapter) == (2, 5, adapter)
    assert [str(warning.message) for warning in warnings] == [
        "Trainer(n_workers=...) is deprecated; use n_runners=",
        "Trainer(max_tasks=...) is deprecated; use max_rollouts=",
        "Trainer(triplet_exporter=...) is deprecated; use adapter=",
    ]
    assert all(warning.filename == __file__ for warning in warnings)


def test_the_new_name_wins_over_the_old_one() -> None:
    with pytest.warns(DeprecationWarning, match="max_tasks") as warnings:
        trainer = agl.Trainer(max_rollouts=3, max_tasks=5)
    assert "differ; using max_rollouts" in str(warnings[1].message)
    assert (trainer.max_rollouts, trainer.max_tasks) == (3, 5)
    with pytest.warns(DeprecationWarning, match="n_workers"):
        assert agl.Trainer(n_runners=3, n_workers=5).n_runners == 3


def test_dev_as_a_setting_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match=r"call trainer.dev"):
        agl.Trainer(dev=True)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("run", "call fit"), ("init", "run_context"), ("client", "fit_v0")],
)
def test_methods_that_do_not_exist_name_what_to_call(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=hint):
        getattr(agl.Trainer(), name)
    assert not hasattr(agl.Trainer(), "nothing_like_it")


# --- override points -------------------------------------------------------------------------------------------------


def test_a_subclass_may_make_any_part_in_its_own_way() -> None:
    made: list[str] = []
    parts = ("tracer", "adapter", "algorithm", "strategy", "store", "runner", "llm_proxy")
    methods = [*(f"_make_{part}" for part in parts), "_normalize_hooks"]

    def noted(method: str) -> Any:
        def make(self: Any, *args: Any, **settings: Any) -> Any:
            made.append(method)
            return getattr(super(Own, self), method)(*args, **settings)

        return make

    Own: Any = type("Own", (agl.Trainer,), {method: noted(method) for method in methods})
    assert Own(n_runners=2, port=1).strategy.server_port == 1
    assert made == methods


def test_a_gateway_is_given_the_store() -> None:
    trainer = agl.Trainer(llm_proxy={"num_retries": 1})
    assert type(trainer.llm_proxy) is agl.LLMProxy
    assert trainer.llm_proxy.get_store() is trainer.store
    proxy = agl.LLMProxy()
    assert agl.Trainer(llm_proxy=proxy).llm_proxy is proxy


def test_nothing_warns_in_ordinary_use() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer = agl.Trainer(algorithm="baseline", n_runners=2, strategy="shm", store="memory", hooks=[agl.Hook()])
    assert [str(warning.message) for warning in warned] == []
    assert (type(trainer.algorithm), type(trainer.strategy)) == (agl.Baseline, agl.SharedMemoryExecutionStrategy)
