"""`agl demo`: train a small agent to use a calculator, on this machine and within three minutes.

The demo uses the full production path: a SQLite store served over HTTP, the gateway, runners in separate processes, a
transformers model behind an OpenAI-compatible endpoint, and GRPO on its weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from agentlightning.base.terminal import counted
from agentlightning.demo import settings as defaults
from agentlightning.demo.tasks import Task, load_tasks, make_tasks
from agentlightning.errors import BadRequestError, MissingExtraError
from agentlightning.training.progress import Style
from agentlightning.training.run_folder import RunFolder, check_writable, new_run_folder

if TYPE_CHECKING:
    from agentlightning.demo.measurement import Measured
    from agentlightning.store.base import LightningStore
    from agentlightning.training.result import GRPOResult

logger = logging.getLogger(__name__)

_TOOL_TOKENS = 16
"""Maximum number of tokens of a calculator result, including the special tokens around it."""
_PACKAGES = ("torch", "transformers", "openai", "matplotlib")


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command line."""

    tasks: Path | None = None
    """JSONL file of tasks; None generates arithmetic tasks."""
    steps: int = defaults.STEPS
    seed: int = 0
    out: Path | None = None
    """Folder of the run; None creates `runs/<time>`."""
    runners: int = 2
    progress: Style = "auto"


@dataclass(frozen=True)
class DemoOutcome:
    """The result of a demo."""

    better: bool
    before: float
    after: float
    greedy_before: float
    greedy_after: float
    p_value: float
    warm_start_seconds: float
    train_seconds: float
    folder: Path


def run_demo(options: DemoOptions, out: TextIO) -> DemoOutcome:
    """Run the demo and print its report.

    Raises:
        MissingExtraError: A package of the extra `demo` is not installed.
        BadRequestError: A task file, folder or setting is wrong. Nothing was started.
        KeyboardInterrupt: The user pressed Ctrl+C. All processes have ended, and the run's folder remains.
    """
    for package in _PACKAGES:
        try:
            is_installed = importlib.util.find_spec(package) is not None
        except ImportError:  # an import hook may reject a package in this way
            is_installed = False
        if not is_installed:
            raise MissingExtraError("agl demo", "demo", package)
    for name in ("steps", "runners"):
        value = getattr(options, name)
        if value < 1:
            raise BadRequestError(f"--{name} must be 1 or more; got {value}")
    folder: Path | None = None
    try:
        train, held_out = _users_tasks(options.tasks) if options.tasks else make_tasks(options.seed)
        if options.out and options.out.is_dir() and any(options.out.iterdir()):  # so that two runs are never mixed
            text = f"The output folder {str(options.out)!r} is not empty. Choose another one, or omit --out"
            raise BadRequestError(text)
        folder = check_writable(options.out) if options.out else new_run_folder()
        _say(
            out,
            f"{counted(len(train), 'training task')}, {counted(len(held_out), 'held-out task')}; run folder: {folder}",
        )
        return _run(options, train, held_out, folder, out)
    except KeyboardInterrupt:
        if folder is None:
            _say(out, "interrupted; nothing was written")
        else:
            names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
            held = ", ".join(names) or "nothing yet"
            _say(out, f"interrupted; the run folder {folder} contains: {held}")
        raise
    except Exception:  # any error is logged, and ends the command
        if folder is not None:
            logger.exception("the demo failed")
            _say(out, f"failed; the traceback is in {folder / 'log.txt'}")
        raise


def _users_tasks(path: Path) -> tuple[list[Task], list[Task]]:
    """Return the user's training and held-out tasks. Raise an error for a question that is too long for the model."""
    train, held_out = load_tasks(path)
    from agentlightning.demo.model import make_tokenizer

    room = defaults.CONTEXT_LENGTH - defaults.MAX_TURNS * (defaults.MAX_COMPLETION_LENGTH + _TOOL_TOKENS)
    questions = [task["question"] for task in (*train, *held_out)]
    tokenizer = make_tokenizer(questions)
    for question in questions:
        length = len(tokenizer(question)["input_ids"])
        if length > room:
            raise BadRequestError(
                f"{path}: the question {question[:60]!r} ... has {length} tokens (words, digits and characters). "
                f"The demo's small model accepts at most {room}. Shorten the question"
            )
    return train, held_out


def _run(options: DemoOptions, train: list[Task], held_out: list[Task], folder: Path, out: TextIO) -> DemoOutcome:
    import agentlightning as agl
    from agentlightning.demo.report import conversations, draw_curve, evaluation_of, report_lines, verdict

    agl.setup_logging("INFO", console=False, files=str(folder / "log.txt"))
    RunFolder(folder).write_config(demo=dataclasses.asdict(options))
    warm_seconds = _warm_start(folder / "model", [*train, *held_out], options.seed, out)
    store = agl.SQLiteLightningStore(folder / "store.db")
    try:
        result = _train(options, train, held_out, folder, store, out)
        comparison = verdict(result)
        lines = asyncio.run(conversations(store, result))
    finally:
        asyncio.run(store.close())
    draw_curve(result, folder / "curve.png")
    for line in (*lines, *report_lines(result, comparison)):
        _say(out, line)
    _say(out, f"saved model, metrics.jsonl, curve.png, config.json, store.db and log.txt in {folder}")
    _say(out, f"to view the run in a browser: agl dashboard {folder}")
    logger.info("verdict: %s, p = %.2g", comparison.verdict, comparison.p_value)
    sampled, greedy = ([evaluation_of(result, s, last) for last in (False, True)] for s in ("sampled", "greedy"))
    return DemoOutcome(
        better=comparison.verdict == "better",
        before=sampled[0].accuracy or 0.0,
        after=sampled[1].accuracy or 0.0,
        greedy_before=greedy[0].accuracy or 0.0,
        greedy_after=greedy[1].accuracy or 0.0,
        p_value=comparison.p_value,
        warm_start_seconds=warm_seconds,
        train_seconds=result.train_seconds,
        folder=folder,
    )


def _warm_start(model: Path, tasks: list[Task], seed: int, out: TextIO) -> float:
    """Create the initial policy and return the seconds that it took."""
    from agentlightning.demo.imitation import make_policy

    start, own = time.monotonic(), defaults.IMITATION_MEASURED_TASKS
    _say(out, "warm start: the model imitates the calculator, then mostly a wrong habit: it copies a number it read")
    _say(
        out, "so it mostly replies wrongly; training rewards only right answers, which reinforces the calculator calls"
    )

    def tell(steps: int, measurement: Measured) -> None:
        uses, right = f"{measurement.tool_use:.0%}", f"{measurement.accuracy:.0%}"
        _say(out, f"  imitation step {steps:3d}: {uses} of {own} warm-start tasks use the calculator, {right} right")

    measurement = make_policy(model, tasks, seed=seed, on_progress=tell)
    seconds = time.monotonic() - start
    _say(out, f"warm start took {seconds:.0f} s: right in {measurement.accuracy:.0%} of {own} warm-start tasks")
    return seconds


def _train(
    options: DemoOptions, train: list[Task], held_out: list[Task], folder: Path, store: LightningStore, out: TextIO
) -> GRPOResult:
    import agentlightning as agl
    from agentlightning.demo.agent import calc_agent

    trainer = agl.Trainer(
        algorithm=agl.GRPO(
            model=folder / "model",
            max_steps=options.steps,
            num_generations=defaults.NUM_GENERATIONS,
            batch_size=min(defaults.BATCH_SIZE, len(train)),
            learning_rate=defaults.LEARNING_RATE,
            lr_scheduler_type="linear",
            num_iterations=defaults.NUM_ITERATIONS,
            minibatch_rollouts=defaults.MINIBATCH_ROLLOUTS,
            epsilon=defaults.EPSILON,
            epsilon_high=defaults.EPSILON_HIGH,
            temperature=defaults.TEMPERATURE,
            max_completion_length=defaults.MAX_COMPLETION_LENGTH,
            eval_steps=defaults.EVAL_STEPS,
            seed=options.seed,
            output_dir=str(folder),
            progress=options.progress,
        ),
        runner={"concurrency": defaults.CONCURRENCY},
        store=store,
        strategy=agl.ClientServerExecutionStrategy(
            n_runners=options.runners, on_listening=lambda url: _say(out, f"dashboard: {url}")
        ),
    )
    trainer.fit(calc_agent, train_dataset=train, val_dataset=held_out)
    return trainer.result


def _say(out: TextIO, text: str) -> None:
    print(text, file=out, flush=True)
