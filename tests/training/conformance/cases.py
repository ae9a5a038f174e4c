"""The algorithms that train weights, by the settings of `agl.GRPO`; the run that each of them is tested with; what it
left, as a user can read it."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest

import agentlightning as agl
from agentlightning.adapter.calls.calls import ModelCall
from agentlightning.types import Rollout
from agentlightning.types.runs import RunRecord
from tests.algorithm.parts import ask, calls_of, refused, rollouts_of, say

RUN: Final = "named"
TASKS: Final = ["one", "two", "three", "four"]
HELD_OUT: Final = ["five", "six"]
STEPS: Final = 4
SMALL: Final[dict[str, Any]] = {
    "max_steps": STEPS, "batch_size": 4, "num_generations": 4, "learning_rate": 1e-3, "max_completion_length": 4,
    "save_steps": 2, "eval_steps": 2, "deterministic": True, "progress": "none",
}  # fmt: skip
"""A run of four steps of sixteen rollouts."""
PROMPT: Final = agl.PromptTemplate(template="Say {task}.", engine="f-string")


@dataclass(frozen=True)
class Case:
    """An algorithm, and the promises that it makes."""

    name: str
    make: Callable[..., Any]
    """Returns the algorithm for the settings of `agl.GRPO`."""
    learns: Mapping[str, Any]
    """Settings by which the reward rises within seconds."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of all its runs, unless a test sets others."""
    section: str = "grpo"
    """Its settings in `config.json`."""
    package: str = "torch"
    roles: tuple[str, ...] = ("main_llm",)
    """The policies that an agent calls."""
    staleness: int = 0
    is_exact: bool = True
    """True if a resumed run has the weights of an uninterrupted one."""
    replays: bool = True
    records_tokens: bool = True
    compares: bool = True
    """True if an advantage compares a rollout with those of the same task."""
    hint: str = "num_iterations"
    """A setting that the alarm on a shift of the policy names."""


def make_trl(**settings: Any) -> Any:
    settings["per_device_train_batch_size"] = settings.pop("batch_size") * settings["num_generations"]
    return agl.TRL(full_determinism=settings.pop("deterministic"), **settings)


def make_verl(**settings: Any) -> Any:
    """Make it with the engine and the platform on the processor that the tests of VERL have."""
    own = ("max_completion_length", "progress", "alarms", "step_timeout_seconds", "record_tokens", "output_dir")
    plain = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    actor: dict[str, Any] = {
        "strategy": "fsdp2", "ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 4096, "use_torch_compile": False,
        "optim": {"lr": settings["learning_rate"], "weight_decay": 0},
        "fsdp_config": {"strategy": "fsdp2", "use_torch_compile": False, "mixed_precision": plain},
    }  # fmt: skip
    rollout = {"name": "hfcpu", "n": settings["num_generations"], "tensor_model_parallel_size": 1}
    config: dict[str, Any] = {
        "actor_rollout_ref.model.path": str(settings["model"]),
        "actor_rollout_ref.model.override_config": {"attn_implementation": "sdpa"},
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor": actor,
        "actor_rollout_ref.rollout": {**rollout, "agent": {"num_workers": settings.get("workers", 1)}},
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 4096,
        "data": {"train_batch_size": settings["batch_size"], "max_prompt_length": 64, "max_response_length": 16},
        "trainer": {
            "device": "cpu", "n_gpus_per_node": 1, "nnodes": 1, "total_training_steps": settings["max_steps"],
            "save_freq": settings["save_steps"], "test_freq": settings["eval_steps"],
        },
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init": {"num_cpus": 16, "num_gpus": 1, "object_store_memory": 300_000_000},
        "agentlightning": {name: settings[name] for name in own if name in settings},
    }  # fmt: skip
    config["agentlightning"]["output_dir"] = str(settings["output_dir"])
    return agl.VERL({**config, **settings.get("verl", {})})


GRPO: Final = Case("GRPO", agl.GRPO, {"max_steps": 10, "num_iterations": 2})
AHEAD: Final = Case(
    "GRPO-ahead", agl.GRPO, {"max_steps": 12, "learning_rate": 3e-3}, staleness=1, is_exact=False,
    defaults={"max_staleness": 1, "deterministic": False, "eval_steps": 0},
)  # fmt: skip
CURRICULUM: Final = Case(
    "GRPO-curriculum", agl.GRPO, {}, defaults={"curriculum": "solve_rate", "tasks": [f"the word {n}" for n in range(9)]}
)
POLICIES: Final = Case(
    "GRPO-policies", agl.GRPO, {"max_steps": 10, "num_iterations": 2}, roles=("planner", "solver"),
    defaults={"policies": ["planner", "solver"]},
)  # fmt: skip
PPO: Final = Case(
    "PPO", agl.PPO, {"max_steps": 8, "num_ppo_epochs": 4, "batch_size": 24, "num_generations": 1}, section="ppo",
    compares=False, hint="num_ppo_epochs",
)  # fmt: skip
SFT: Final = Case(
    "SFT", agl.SFT, {"max_steps": 8, "top_share": 0.25}, section="sft", compares=False, defaults={"top_share": 0.5}
)
TRL: Final = Case(
    "TRL", make_trl, {"max_steps": 24, "num_iterations": 2, "beta": 0.0}, section="trl", package="trl", is_exact=False,
    replays=False, records_tokens=False,
)  # fmt: skip
VERL: Final = Case("VERL", make_verl, {}, section="verl", package="verl", is_exact=False, replays=False)


def each(*cases: Case) -> Any:
    """Return the marker that runs a test with each of these algorithms, as its argument `case`."""

    def parameter(case: Case) -> Any:
        marks: list[Any] = []
        if case.package != "torch":
            reason = f"{case.package} is in an environment of its own: make test-{case.package}"
            missing = find_spec(case.package) is None
            marks += [pytest.mark.skipif(missing, reason=reason), pytest.mark.filterwarnings("ignore")]
        if case is VERL:
            marks.append(pytest.mark.timeout(3600))
        return pytest.param(case, marks=marks, id=case.name)

    return pytest.mark.parametrize("case", [parameter(case) for case in cases], scope="session")


OURS: Final = (GRPO, AHEAD, POLICIES, PPO, SFT)
ALL: Final = (*OURS, TRL, VERL)


# --- what agents do --------------------------------------------------------------------------------------------------

LATE: Final = 60.0
"""Seconds that an agent waits for another one before its test fails."""


class InStep:
    """Lets the rollouts of a step of an asynchronous run end once those of the next step were answered, and the last
    ones after the step before: each step then trains its own rollouts, with replies of the weights before the newest,
    whatever the timing. A tracker of the run."""

    def __init__(self, last: int, rollouts: int) -> None:
        self._last, self._rollouts = last, rollouts
        self._answered, self._recorded = Counter[int](), 0
        self._changed = threading.Condition()

    def wait(self, step: int) -> None:
        """Return when a rollout of a step may end."""
        with self._changed:
            self._answered[step] += 1
            self._changed.notify_all()
            may_end = self._changed.wait_for(
                lambda: self._answered[step + 1] == self._rollouts if step < self._last else self._recorded >= step - 1,
                timeout=LATE,
            )
        assert may_end, f"after a rollout of step {step} the run stands still"

    def start(self, run: agl.TrackedRun) -> None: ...

    def record(self, record: RunRecord) -> None:
        with self._changed:
            if record.kind == "step":
                self._recorded = record.step
                self._changed.notify_all()

    def finish(self, ending: agl.RunEnding) -> None: ...


ENDS: Final = {
    (1, 2): "raises", (1, 3): "fault", (2, 1): "none", (2, 2): "nan",
    (3, 0): "no call", (3, 1): "string", (3, 2): "too long",
}  # fmt: skip
"""The ending of a training rollout for its task and its sample; all others earn a reward."""
EXCLUDED: Final = {"infrastructure_fault": 3, "no_reward": 1, "no_call": 1, "refused_call": 1}
"""Rollouts of a step that earn no reward to learn from."""


class ManyEnds(agl.LitAgent[Any]):
    """Calls each policy of the run once; a part of its rollouts fails, in every way in which a rollout can fail."""

    def __init__(self, roles: Sequence[str], in_step: InStep | None = None) -> None:
        super().__init__()
        self._roles, self._in_step = roles, in_step

    def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
        place, train = rollout.metadata or {}, rollout.mode == "train"
        policies = [resources[role].with_attempted_rollout(rollout) for role in self._roles]
        end = ENDS.get((place["task"], place["sample"])) if train else None
        prompt = resources["prompt"].format(task=task)
        text = "" if end == "no call" else "".join(ask(llm, [say(prompt)])["content"] for llm in policies)
        if end == "too long":
            assert refused(policies[0], [say("1 " * 300)]) == 400
        if train and self._in_step is not None:
            self._in_step.wait(place["step"])
        earned = sum(ord(character) % 17 for character in text) / 100 + (place["sample"] / 1000 if train else 0.0)
        match end:
            case "raises":
                raise RuntimeError("the tool broke")
            case "fault":
                raise agl.PolicyFault("it said something rude", reward=-1.0)
            case _:
                return {"none": None, "nan": float("nan"), "no call": 99.0, "string": "a string"}.get(end or "", earned)


class Digits(agl.LitAgent[Any]):
    """Earns the share of digits in the replies, which an untrained model can learn."""

    def __init__(self, roles: Sequence[str], in_step: InStep | None = None) -> None:
        super().__init__()
        self._roles, self._in_step = roles, in_step

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        policies = [resources[role].with_attempted_rollout(rollout) for role in self._roles]
        text = "".join(ask(llm, [say(task)])["content"] for llm in policies)
        if self._in_step is not None and rollout.mode == "train":
            self._in_step.wait((rollout.metadata or {})["step"])
        return sum(character.isdigit() for character in text) / max(1, len(text))


class StoppingStore(agl.SQLiteLightningStore):
    """Does something before or after the records of a kind and a step are stored."""

    def __init__(self, path: Path, point: str, stop: Callable[[], None]) -> None:
        """A point such as `before ledger 2`."""
        super().__init__(path)
        self._when, self._kind, step = point.split()
        self._step, self._stop = int(step), stop

    async def add_run_records(self, run_id: str, records: Sequence[RunRecord]) -> int:
        is_there = any((record.kind, record.step) == (self._kind, self._step) for record in records)
        if is_there and self._when == "before":
            self._stop()
        added = await super().add_run_records(run_id, records)
        if is_there and self._when == "after":
            self._stop()
        return added


# --- a run and what it left ------------------------------------------------------------------------------------------


def fit(case: Case, agent: Any, model: Path, folder: Path, *, held_out: Any = None, **settings: Any) -> Any:
    """Train under the name of `RUN` with a store in the folder. Settings of the Trainer begin with `trainer_`.

    A class of agents is made for the policies of the case; in an asynchronous run its rollouts go in step.
    """
    of_trainer = {key.removeprefix("trainer_"): settings.pop(key) for key in list(settings) if "trainer_" in key}
    settings = {"output_dir": folder / "run", "tasks": TASKS, **SMALL, **case.defaults, "model": model, **settings}
    tasks = settings.pop("tasks")
    if held_out is None:
        settings["eval_steps"] = 0
    if isinstance(agent, type):
        rollouts = min(len(tasks), settings["batch_size"]) * settings["num_generations"]
        in_step = InStep(settings["max_steps"], rollouts) if case.staleness else None
        agent = agent(case.roles, in_step)
        of_trainer["trackers"] = [*of_trainer.get("trackers", ()), *([in_step] if in_step else ())]
    trainer = agl.Trainer(
        algorithm=case.make(**settings),
        **{
            "runner": {"type": "agentlightning.LitAgentRunner", "concurrency": 64 if case.staleness else 8},
            "strategy": "shm",
            "store": agl.SQLiteLightningStore(folder / "store.db"),
            "run_id": RUN,
            **of_trainer,
        },
    )
    try:
        trainer.fit(agent, train_dataset=tasks, val_dataset=held_out)
    finally:
        if case is TRL:  # transformers has switched it on for the process
            sys.modules["torch"].use_deterministic_algorithms(False)
    return trainer.result


def fit_whole(case: Case, model: Path, folder: Path, *, steps: int = STEPS, **settings: Any) -> Any:
    """Train with the agent that fails in every way, held-out tasks, and resources beside the policy."""
    judge = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="judge")
    beside = {"prompt": PROMPT, "judge": judge}
    arguments = {"held_out": HELD_OUT, "max_steps": steps, "trainer_initial_resources": beside, **settings}
    return fit(case, arguments.pop("agent", ManyEnds), model, folder, **arguments)


@dataclass
class Books:
    """Everything that the store of a run holds of it."""

    run: Any
    records: list[RunRecord]
    rollouts: list[Rollout]
    calls: list[ModelCall]
    """Model calls of the training rollouts."""
    held_out: list[Rollout]
    held_out_calls: list[ModelCall]
    lines: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Lines of `metrics.jsonl`."""

    def of(self, kind: str) -> list[RunRecord]:
        return [record for record in self.records if record.kind == kind]

    def endings(self) -> list[dict[str, Any]]:
        """Return every call of the ledger with its step and its rollout."""
        return [
            {**call, "step": record.step, "rollout": record.name}
            for record in self.of("ledger")
            for call in record.data["calls"]
        ]

    def curve(self, *names: str) -> list[dict[str, Any]]:
        """Return the parts of each step that two equal runs have in common."""
        names = names or ("step", "mean_reward", "calls_captured", "calls_trained", "calls_excluded", "held_out")
        return [{name: line[name] for name in (*names, "update", "weights")} for line in self.lines]

    def evaluations(self) -> list[tuple[int, str, list[float | None]]]:
        return [(record.step, record.name, record.data["rewards"]) for record in self.of("evaluation")]


def stored(folder: Path, use: Callable[[Any], Any]) -> Any:
    """Return the result of `use` for the store of a run."""

    async def opened() -> Any:
        store = agl.SQLiteLightningStore(folder / "store.db")
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(opened())


def read(folder: Path, run_id: str = RUN, *, output: str = "run") -> Books:
    """Return the content of a run's store and of its output folder."""

    async def books(store: Any) -> Books:
        trained, held_out = await rollouts_of(store, "train"), await rollouts_of(store, "val")
        return Books(
            await store.get_run_by_id(run_id),
            list(await store.query_run_records(run_id)),
            trained,
            await calls_of(store, trained),
            held_out,
            await calls_of(store, held_out),
        )

    run_books: Books = stored(folder, books)
    metrics = folder / output / "metrics.jsonl"  # not there if the first step ended the run
    run_books.lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return run_books


def assert_complete(books: Books, steps: int, *, starts: int = 1) -> None:
    """Check that a run took each step once, and that its ledger has every call of its rollouts once."""
    numbers = list(range(1, steps + 1))
    assert [line["step"] for line in books.lines] == [record.step for record in books.of("step")] == numbers
    assert (books.run.state, books.run.last_step, books.run.starts) == ("succeeded", steps, starts)
    assert {rollout.status for rollout in books.rollouts} <= {"succeeded", "failed", "cancelled"}

    endings = books.endings()
    entries = Counter((call["rollout"], call["attempt_id"], call["call_id"]) for call in endings)
    assert set(entries) == {call.ref for call in books.calls}
    assert set(entries.values()) <= {1}
    for line, record in zip(books.lines, books.of("step"), strict=True):
        same = (
            "mean_reward",
            "calls_captured",
            "calls_trained",
            "calls_excluded",
            "weights",
            "update",
            "rollouts_done",
        )
        assert {name: line[name] for name in same} == {name: record.data[name] for name in same}
        own = [call for call in endings if call["step"] == line["step"]]
        assert line["calls_trained"] == sum(call["ending"] == "trained" for call in own)
        assert line["calls_excluded"] == dict(Counter(call["reason"] for call in own if call["ending"] != "trained"))
        assert line["calls_captured"] == len(own)
