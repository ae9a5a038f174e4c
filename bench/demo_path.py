"""The cost of one model call of `agl demo` from the agent's client to the stored span, in milliseconds.

The demo's training runs twice from the same weights, some steps and more steps, each in a separate process. The result
is the difference, which excludes imports and starts. The learner's seconds are subtracted.

    figures = measure_demo_path(model)          # for `make bench-learning`; `model` as `make_policy` writes it
    python -m bench.demo_path                   # alone; makes the model first, a minute
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.store_figures import Figure

STEPS = (2, 8)
TARGET_MS = 8.0


def measure_demo_path(model: Path, steps: tuple[int, int] = STEPS) -> list[Figure]:
    """Return wall and processor milliseconds per model call of the demo's training."""
    fewer, more = (Counter(_in_a_process(model, count)) for count in steps)
    more.subtract(fewer)
    calls = more["calls"]
    each = {name: 1e3 * value / calls for name, value in more.items()}
    note = (
        f"{calls:.0f} calls; processor: {each['own_cpu'] - each['update']:.2f} in the process of store, gateway and "
        f"engine, {each['runners_cpu']:.2f} in the runners"
    )
    processor = each["own_cpu"] - each["update"] + each["runners_cpu"]
    return [
        Figure("path of a model call of the demo, ms", each["wall"] - each["update"], TARGET_MS, True, note=note),
        Figure("processor time of a model call of the demo, ms", processor),
    ]


def _in_a_process(model: Path, steps: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.demo_path", str(model), str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _train(model: Path, steps: int, folder: Path) -> dict[str, float]:
    import agentlightning as agl
    from agentlightning.demo import settings
    from agentlightning.demo.agent import calc_agent
    from agentlightning.demo.tasks import make_tasks
    from bench.demo_grpo import demo_grpo

    store = agl.SQLiteLightningStore(folder / "store.db")
    trainer = agl.Trainer(
        algorithm=demo_grpo(model=model, max_steps=steps, output_dir=str(folder / "run")),
        runner={"concurrency": settings.CONCURRENCY},
        store=store,
        strategy="cs",
        n_runners=2,
    )
    before = _cpu(resource.RUSAGE_SELF)
    trainer.fit(calc_agent, train_dataset=make_tasks()[0])
    figures = trainer.result.metrics
    return {
        "calls": sum(step.calls_captured for step in figures),
        "wall": trainer.result.train_seconds,
        "update": sum(step.seconds["train"] for step in figures),
        "own_cpu": _cpu(resource.RUSAGE_SELF) - before,
        "runners_cpu": _cpu(resource.RUSAGE_CHILDREN),
    }


def _cpu(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) == 3:
            print(json.dumps(_train(Path(sys.argv[1]), int(sys.argv[2]), Path(folder))))
            return 0
        from agentlightning.demo.imitation import make_policy
        from agentlightning.demo.tasks import make_tasks

        train, held_out = make_tasks()
        make_policy(Path(folder) / "model", [*train, *held_out])
        figures = measure_demo_path(Path(folder) / "model")
    for figure in figures:
        print(figure.line())
    return 0 if all(figure.met is not False for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
