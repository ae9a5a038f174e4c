"""The results of whole runs of each algorithm, to the last bit: made at one commit, compared at the next.

    python -m tests.training.golden_runs make build/golden    # at the commit before a change
    python -m tests.training.golden_runs check build/golden   # after it; exit status 1 if anything is another

One file per run: the records of its steps and evaluations without times, the ledger of every call, and a SHA-256 of
each weight file. Names of rollouts are replaced by step, task and sample. Floats depend on the processor and on the
version of torch: files of another machine or environment say nothing. A run whose package is not installed is passed
over with a line; TRL has an environment of its own (`make test-trl`). In an asynchronous run the timing decides which
weights answer a call: in the one here the agent does, and names the seed of each call. Not among them are runs of VERL,
whose engine draws without a seed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import agentlightning as agl
from tests.algorithm.parts import ask, save_untrained_model, say
from tests.prompt_search import parts as apo
from tests.training.conformance.cases import InStep

RUN_ID = "golden"
TASKS = ["one", "two", "three", "four"]
SMALL: dict[str, Any] = {
    "max_steps": 4, "batch_size": 4, "num_generations": 4, "learning_rate": 2e-3, "max_completion_length": 4,
    "deterministic": True, "progress": "none",
}  # fmt: skip
OF_TRL: dict[str, Any] = {
    "max_steps": 4, "num_generations": 4, "per_device_train_batch_size": 16, "learning_rate": 2e-3,
    "max_completion_length": 4, "full_determinism": True, "progress": "none",
}  # fmt: skip
_VOLATILE = re.compile(
    r"seconds|_per_second|time|memory|folder|path|attempt_id|call_id|worker|trace|span|request_id|response_id|endpoint"
    r"|in_flight|waited|queue|^tasks$"
)
_ROLLOUT = re.compile(r"ro-[0-9a-zA-Z-]+")


@agl.rollout
def two_turns(task: str, llm: agl.LLM) -> float:
    """An agent with two calls; the reward is of the text alone."""
    messages: list[dict[str, Any]] = [say(task)]
    messages.append(ask(llm, messages))
    text = ask(llm, [*messages, say("go on")])["content"] or ""
    return sum(ord(character) % 17 for character in text) / 100


@agl.rollout
def one_turn(task: str, llm: agl.LLM) -> float:
    """An agent whose rollouts have one row each, as TRL takes them."""
    text = ask(llm, [say(task)])["content"] or ""
    return sum(ord(character) % 17 for character in text) / 100


@agl.rollout
def plans_and_solves(task: str, planner: agl.LLM, solver: agl.LLM) -> float:
    """Two policies in one task."""
    plan = ask(planner, [say(task)])["content"] or ""
    reply = ask(solver, [say(task), say(plan or "?")])["content"] or ""
    return sum(ord(character) % 17 for character in plan + reply) / 100


def fit(
    algorithm: Any, agent: Any, folder: Path, *, run_id: str = RUN_ID, tasks: Sequence[Any] | None = TASKS,
    concurrency: int = 4, trackers: Sequence[Any] = (),
) -> None:  # fmt: skip
    trainer = agl.Trainer(
        algorithm=algorithm,
        strategy="shm",
        store=agl.SQLiteLightningStore(folder / "store.db"),
        runner={"type": "agentlightning.LitAgentRunner", "concurrency": concurrency},
        trackers=trackers,
    )
    trainer.fit(agent, train_dataset=tasks, val_dataset=None if tasks is None else TASKS[:2], run_id=run_id)


def grpo(model: Path, folder: Path, **settings: Any) -> None:
    agent = plans_and_solves if "policies" in settings else two_turns
    own: dict[str, Any] = {**SMALL, "save_steps": 2, **settings}
    fit(agl.GRPO(model=model, output_dir=folder / "run", **own), agent, folder)


def ahead(model: Path, folder: Path) -> None:
    """Each step trains replies of the weights before the newest ones; each call is decoded alone, by its own seed."""
    in_step = InStep(SMALL["max_steps"], SMALL["batch_size"] * SMALL["num_generations"])

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        place = rollout.metadata or {}
        seed = zlib.crc32(f"{rollout.mode} {task} {json.dumps(place, sort_keys=True)}".encode())
        text = ask(llm, [say(task)], seed=seed)["content"] or ""
        if rollout.mode == "train":
            in_step.wait(place["step"])
        return sum(ord(character) % 17 for character in text) / 100

    own: dict[str, Any] = {**SMALL, "deterministic": False, "max_staleness": 1, "engine_batch": 1, "save_steps": 2}
    algorithm = agl.GRPO(model=model, output_dir=folder / "run", **own)
    fit(algorithm, agent, folder, concurrency=64, trackers=[in_step])


def resumed(model: Path, folder: Path) -> None:
    """Run two steps, and the other two in another process."""
    program = (
        "import sys, pathlib; from tests.training.golden_runs import grpo; "
        "grpo(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), max_steps=2)"
    )
    subprocess.run([sys.executable, "-c", program, str(model), str(folder)], check=True)
    grpo(model, folder)


def sft(model: Path, folder: Path) -> None:
    sampled: dict[str, Any] = {
        "max_steps": 1,
        "top_share": 1.0,
        "learning_rate": 1e-12,
        "output_dir": folder / "sampled",
    }
    fit(agl.SFT(model=model, **{**SMALL, **sampled}), two_turns, folder, run_id="sampled")
    settings: dict[str, Any] = {name: value for name, value in SMALL.items() if name != "num_generations"}
    fit(
        agl.SFT(
            model=model, from_run="sampled", rollouts="stored", best_per_task=1, output_dir=folder / "run", **settings
        ),
        two_turns,
        folder,
        tasks=None,
    )


def prompts(algorithm: Callable[..., Any], answer: Callable[[dict[str, Any]], str], **settings: Any) -> Any:
    def run(model: Path, folder: Path) -> None:
        del model
        with apo.asked(answer) as server:
            trainer = agl.Trainer(
                algorithm=algorithm(apo.llm(server), **settings),
                strategy="shm", progress="none", initial_resources=apo.resources(),
                store=agl.SQLiteLightningStore(folder / "store.db"),
            )  # fmt: skip
            trainer.fit(apo.heeds_rules, train_dataset=apo.TRAIN, val_dataset=apo.VAL, run_id=RUN_ID)

    return run


def gepa(model: Path, folder: Path) -> None:
    from tests.prompt_search.test_gepa_search import helpful

    prompts(agl.GEPA, helpful, max_metric_calls=200)(model, folder)


def trl(model: Path, folder: Path) -> None:
    fit(agl.TRL(model=model, output_dir=folder / "run", **OF_TRL), one_turn, folder)


RUNS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    **{f"grpo-{seed}": ("torch", lambda model, folder, seed=seed: grpo(model, folder, seed=seed)) for seed in range(3)},
    "grpo-resumed": ("torch", resumed),
    "grpo-ahead": ("torch", ahead),
    "grpo-policies": ("torch", lambda model, folder: grpo(model, folder, policies=["planner", "solver"])),
    "ppo": ("torch", lambda model, folder: fit(
        agl.PPO(model=model, output_dir=folder / "run", num_ppo_epochs=2,
                **{name: value for name, value in SMALL.items() if name != "num_generations"}), two_turns, folder)),
    "sft": ("torch", sft),
    "apo": ("openai", prompts(agl.APO, apo.helpful, **apo.SMALL)),
    "gepa": ("gepa", gepa),
    "trl": ("trl", trl),
}  # fmt: skip
"""For each run, the package that it needs and the function that makes it."""


# --- what a run came to ----------------------------------------------------------------------------------------------


async def recorded(folder: Path) -> dict[str, Any]:
    """Return the steps, the evaluations, and the ledger of a run."""
    store = agl.SQLiteLightningStore(folder / "store.db")
    try:
        places: dict[str, str] = {}
        for number, rollout in enumerate(await store.query_rollouts(run_id=RUN_ID, sort_by="start_time")):
            about = rollout.metadata or {}
            place = [str(about[name]) for name in ("step", "task", "sample") if name in about]
            places[rollout.rollout_id] = f"rollout {rollout.mode} {' '.join(place) or number}"
        records = await store.query_run_records(RUN_ID)
    finally:
        await store.close()
    by_kind: dict[str, list[Any]] = {}
    for record in records:
        entry = {"step": record.step, "name": record.name, **record.data}
        text = json.dumps(plain(entry)).replace(str(folder), "FOLDER")
        text = _ROLLOUT.sub(lambda match: places.get(match[0], "rollout"), text)
        by_kind.setdefault(record.kind, []).append(json.loads(text))
    return {kind: sorted(entries, key=lambda entry: json.dumps(entry)) for kind, entries in sorted(by_kind.items())}


def plain(value: Any) -> Any:
    """Return a value of a record without the parts that differ in another run of the same program."""
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        return {key: plain(each) for key, each in sorted(entries.items()) if not _VOLATILE.search(key)}
    return [plain(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value


def digests(folder: Path) -> dict[str, str]:
    """Return a SHA-256 of each file of weights of a run."""
    files = sorted((folder / "run").rglob("*.safetensors")) if (folder / "run").exists() else []
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def result_of(name: str) -> dict[str, Any]:
    """Make a run in a folder of its own and return its results."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        RUNS[name][1](save_untrained_model(folder / "model"), folder)
        return {"weights": digests(folder), **asyncio.run(recorded(folder))}


def differences(before: Any, after: Any, place: str = "") -> list[str]:
    """Return the places at which two results differ."""
    if isinstance(before, list) and isinstance(after, list):
        before, after = dict(enumerate(cast("list[Any]", before))), dict(enumerate(cast("list[Any]", after)))
    if isinstance(before, dict) and isinstance(after, dict):
        old, new = cast("dict[Any, Any]", before), cast("dict[Any, Any]", after)
        return [line for key in old | new for line in differences(old.get(key), new.get(key), f"{place}/{key}")]
    return [] if before == after else [f"{place}: {before!s:.80} -> {after!s:.80}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "check"])
    parser.add_argument("folder", type=Path, help="where the files are")
    parser.add_argument("names", nargs="*", help=f"which runs; all by default: {', '.join(RUNS)}")
    options = parser.parse_args()
    if unknown := set(options.names) - set(RUNS):
        parser.error(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    equal = True
    for name in options.names or RUNS:
        if find_spec(RUNS[name][0]) is None:
            print(f"{name}: passed over, {RUNS[name][0]} is not installed", flush=True)
            continue
        file = options.folder / f"{name}.json"
        if options.what == "check" and not file.exists():
            equal = False
            print(f"{name}: there is no {file}; make it at the commit to compare with", flush=True)
            continue
        program = (
            f"import json; from tests.training.golden_runs import result_of; print(json.dumps(result_of({name!r})))"
        )
        command = [sys.executable, "-W", "ignore", "-c", program]  # each in a process of its own, which keeps no state
        output = subprocess.run(command, capture_output=True, check=False, text=True)
        if output.returncode:
            equal = False
            print(f"{name}: FAILED\n{output.stderr[-2000:]}", flush=True)
            continue
        result = json.loads(output.stdout.splitlines()[-1])
        if options.what == "make":
            file.write_text(json.dumps(result, indent=1, sort_keys=True))
            print(f"{name}: made", flush=True)
            continue
        diffs = differences(json.loads(file.read_text()), result)
        equal &= not diffs
        print(
            f"{name}: " + ("equal" if not diffs else f"{len(diffs)} differences"), *diffs[:20], sep="\n  ", flush=True
        )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
