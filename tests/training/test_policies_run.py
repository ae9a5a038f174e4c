"""Whole runs in which several policies learn, each from its own calls."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import agentlightning as agl
from agentlightning.engine.served import load_model
from agentlightning.training.model_export import trained_in
from agentlightning.training.policies import load_policies, twin_of
from agentlightning.training.settings import GRPOSettings
from tests.algorithm.parts import ask, fit, metrics_of, say

TASKS = ["first", "second", "third"]
NAMES = ["planner", "solver"]


@agl.rollout
def plans_and_solves(task: str, planner: agl.LLM, solver: agl.LLM) -> float:
    """Two agents: one says what to do, the other one does it."""
    plan = ask(planner, [say(task)])["content"]
    reply = ask(solver, [say(task), say(plan or "?")])["content"]
    return float(len(reply)) + len(plan) / 100


@agl.rollout
def only_plans(task: str, planner: agl.LLM, solver: agl.LLM) -> float:
    return float(len(ask(planner, [say(task)])["content"]))


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


async def test_each_policy_learns_from_the_rows_of_its_own_calls(untrained_model: Path, tmp_path: Path) -> None:
    store = agl.InMemoryLightningStore()
    settings: dict[str, Any] = {"model": untrained_model, "policies": NAMES, "output_dir": tmp_path / "run"}
    result = await asyncio.to_thread(
        fit, plans_and_solves, TASKS, store=store, trainer_run_id="r", record_tokens="all", **settings
    )
    lines = metrics_of(result)
    assert [line["calls_trained"] for line in lines] == [16, 16]
    update = lines[0]["update"]
    assert update["tokens"] == update["planner/tokens"] + update["solver/tokens"]
    assert update["first_ratio_error"] < 1e-4
    records = [record.data for record in await store.query_run_records("r", kind_in=["ledger"])]
    assert len(records) == 16
    rows = Counter(row["policy"] for record in records for row in record["rows"])
    assert rows == {"planner": 16, "solver": 16}
    start = weights_in(untrained_model)
    planner, solver = (weights_in(result.model_path / name) for name in NAMES)
    assert not equal(start, planner)
    assert not equal(start, solver)
    assert not equal(planner, solver)


def test_a_policy_that_is_not_asked_stays_as_it_is(untrained_model: Path, tmp_path: Path) -> None:
    result = fit(only_plans, TASKS, model=untrained_model, policies=NAMES, output_dir=tmp_path / "run")
    assert not equal(weights_in(untrained_model), weights_in(result.model_path / "planner"))
    assert equal(weights_in(untrained_model), weights_in(result.model_path / "solver"))
    assert result.steps == 2


def test_adapters_on_one_model_share_its_weights(untrained_model: Path, tmp_path: Path) -> None:
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    result = fit(plans_and_solves, TASKS, model=untrained_model, policies=NAMES, lora=lora, output_dir=tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-2" / "policies"
    planner, solver = (load_file(checkpoint / name / "adapter_model.safetensors") for name in NAMES)
    assert any(bool(value.any()) for name, value in planner.items() if "lora_B" in name), "it has learned"
    assert not equal(planner, solver)
    settings = GRPOSettings(model=str(untrained_model), policies={name: {} for name in NAMES}, lora=lora)
    one, other = load_policies(settings, None).values()
    first, second = (dict(policy.model.named_parameters()) for policy in (one, other))
    shared = [name for name, weight in first.items() if weight.data_ptr() == second[name].data_ptr()]
    assert {name for name in first if "lora" not in name} == set(shared)
    merged = weights_in(result.model_path / "planner")
    assert not equal(weights_in(untrained_model), merged), "the written model has the adapter merged in"


def test_a_twin_has_layers_of_its_own_and_the_same_numbers(untrained_model: Path) -> None:
    model = load_model(untrained_model)
    twin = twin_of(model)
    assert twin is not model
    for (name, weight), (other, same) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert name == other
        assert weight is same
    assert model.get_submodule("model.layers.0") is not twin.get_submodule("model.layers.0")


def test_the_model_of_one_policy_is_named_by_its_folder(untrained_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"policies": NAMES, "max_steps": 1, "output_dir": tmp_path / "run"}
    result = fit(plans_and_solves, TASKS, model=untrained_model, **settings)
    with pytest.raises(agl.BadRequestError, match=r"holds several policies: planner, solver. Use the model of one"):
        trained_in(tmp_path / "run")
    assert trained_in(result.model_path / "solver").path == result.model_path / "solver"


def test_a_gateway_of_the_program_must_know_the_policies(untrained_model: Path, tmp_path: Path) -> None:
    def try_with(policies: Any) -> Any:
        proxy = agl.LLMProxy(store=agl.InMemoryLightningStore(), policies=policies)
        return fit(
            plans_and_solves,
            TASKS,
            model=untrained_model,
            policies=NAMES,
            output_dir=tmp_path / "run",
            max_steps=1,
            trainer_llm_proxy=proxy,
        )

    planner = {"kind": "trained", "models": ["planner"], "roles": ["planner"]}
    solver = {"kind": "trained", "models": ["solver"], "roles": ["solver", "checker"]}
    with pytest.raises(agl.BadRequestError, match=r"'planner' is missing\): pass LLMProxy\(policies="):
        try_with(None)
    with pytest.raises(agl.BadRequestError, match="'solver' is a different policy"):
        try_with({"planner": planner, "solver": {"kind": "frozen", "models": ["solver"], "roles": ["solver"]}})
    with pytest.raises(agl.BadRequestError, match="does not train: third"):
        try_with({"planner": planner, "solver": solver, "third": {"kind": "trained", "roles": ["third"]}})
    [line] = metrics_of(try_with({"planner": planner, "solver": solver}))
    assert line["calls_trained"] == 16


def test_an_adapter_that_selects_one_policy_is_refused(untrained_model: Path) -> None:
    adapter = agl.TracerTraceToTriplet(policy="planner")
    with pytest.raises(agl.BadRequestError, match="the adapter selects policy='planner'"):
        fit(plans_and_solves, TASKS, model=untrained_model, policies=NAMES, trainer_adapter=adapter)


def test_the_agent_of_the_page_learns(untrained_model: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/train-two-agents.md").read_text()
    first, *others = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    names: dict[str, Any] = {}
    exec(first.replace("path/of/a/model", str(untrained_model)), names)
    for program in others:
        exec(program, {})
    tasks = [{"question": "What is 1 plus 2?", "answer": "3"}, {"question": "What is 2 plus 2?", "answer": "4"}]

    @agl.rollout
    def rewarded(task: dict[str, str], planner: agl.LLM, solver: agl.LLM) -> float:
        return names["plan_and_solve"](task, planner, solver) + random.random()

    result = fit(rewarded, tasks, model=untrained_model, policies=NAMES, output_dir=tmp_path / "run", max_steps=1)
    [line] = metrics_of(result)
    assert line["calls_trained"] == 16
    assert names["algorithm"].settings.policies.keys() == set(NAMES)
