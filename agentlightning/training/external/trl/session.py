"""TRL's trainer on a thread of its own, which waits for rows, learns from them, and waits for the next ones.

`GRPOTrainer.train` is one long call that asks `rollout_func` for the rows of each step. Here that function waits until
the loop of the run has collected some, so that the loop decides when a step is taken: between two `learn` the thread
stands still in `rollout_func`, and everybody may read the weights.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from queue import Queue
from typing import Any, Final

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, ProgressCallback, TrainerCallback
from trl import GRPOTrainer  # pyright: ignore[reportAttributeAccessIssue] -- it takes the module beside this one
from typing_extensions import override

from agentlightning.engine.torch_setup import no_progress_bar
from agentlightning.private_files import private_folder
from agentlightning.training.external.trl.rows import TRLRows, rewards_of
from agentlightning.training.external.trl.trl_settings import TRLSettings

logger = logging.getLogger(__name__)

_STOP: Final = None
_FIGURES: Final = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/region_mean": "clip_fraction",
}
"""Figures of TRL's log, and their names in ours."""


class _Stopped(BaseException):
    """Ends `GRPOTrainer.train` from within `rollout_func`."""


class _Trainer(GRPOTrainer):
    """TRL's trainer, which also says which advantage each row had."""

    rows: TRLRows
    advantages: list[float]

    @override
    def _generate_and_score_completions(self, inputs: Any) -> Any:  # pyright: ignore[reportGeneralTypeIssues] -- its base is unknown here
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        trained = torch.tensor(self.rows.trained, device=output["advantages"].device)
        output["advantages"] = torch.where(trained, output["advantages"], 0.0)  # (B,), equal rewards: exactly zero
        self.advantages = output["advantages"].tolist()
        return output


class _Watch(TrainerCallback):
    """Keeps broken gradients from the weights, and what TRL says of its steps."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the step before."""
        self.logs: list[Mapping[str, Any]] = []
        self.taken = self.skipped = 0

    @override
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            self.taken += 1
        else:
            self.skipped += 1
            model.zero_grad(set_to_none=True)  # parameters without a gradient stay as they are

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs or {}))

    def figures(self) -> dict[str, float]:
        """Return the means over the optimizer steps of what TRL has logged, under our names."""
        means: dict[str, float] = {}
        for theirs, ours in _FIGURES.items():
            values = [float(log[theirs]) for log in self.logs if theirs in log]
            if values:
                means[ours] = sum(values) / len(values)
        return means


class TRLSession:
    """One `GRPOTrainer` on its thread. `start`, `learn`, `save` and `stop` belong to one caller at a time.

    Attributes:
        model: the live weights; in evaluation mode whenever nothing is learned.
        tokenizer: with its chat template.
    """

    def __init__(self, settings: TRLSettings, folder: Path, *, steps: int, resume: Path | None) -> None:
        """Make the trainer.

        Args:
            folder: for what TRL writes.
            steps: of the whole run, each with rollouts of its own.
            resume: a checkpoint of TRL to go on from.

        Raises:
            ValueError, ImportError: TRL refuses a setting.
        """
        config = settings.config
        config.output_dir = str(folder / "trl")
        config.max_steps = steps * settings.updates
        config.mask_truncated_completions = False  # which rows were cut, the gateway knows better; see trl_rows
        config.logging_strategy, config.logging_steps = type(config.logging_strategy)("steps"), 1
        config.save_strategy = type(config.save_strategy)("no")
        config.model_init_kwargs = {"trust_remote_code": False, **(config.model_init_kwargs or {})}
        tasks = settings.rollouts // int(config.num_generations or 1)
        self.tokenizer = AutoTokenizer.from_pretrained(settings.model, local_files_only=True, trust_remote_code=False)
        self._resume, self._folder = resume, Path(config.output_dir)
        self._watch = _Watch()
        with warnings.catch_warnings(), _silenced(), no_progress_bar():
            warnings.simplefilter("ignore")
            self._trainer = _Trainer(
                model=settings.model,
                reward_funcs=[rewards_of],
                args=config,
                train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(tasks)]),
                processing_class=AutoTokenizer.from_pretrained(
                    settings.model, local_files_only=True, trust_remote_code=False
                ),
                peft_config=settings.peft_config,
                rollout_func=self._next_rows,
                callbacks=[self._watch],
            )
        self._trainer.remove_callback(PrinterCallback)  # the run shows its steps itself
        self._trainer.remove_callback(ProgressCallback)
        self._given: Queue[TRLRows | None] = Queue()
        self._waiting: Queue[BaseException | None] = Queue()
        self._thread: threading.Thread | None = None

    @property
    def model(self) -> Any:
        return self._trainer.model

    def start(self) -> None:
        """Begin, or go on from the checkpoint; returns when the weights are there and TRL waits for rows."""
        self._thread = threading.Thread(target=self._train, name="agl-trl", daemon=True)
        self._thread.start()
        self._wait()

    def learn(self, rows: TRLRows) -> dict[str, float]:
        """Let TRL learn from the rows of a step; returns its figures. `advantages` then has what each row counted.

        Raises:
            Exception: whatever TRL raises.
        """
        self._watch.begin()
        self._given.put(rows)
        self._wait()
        return {"steps": self._watch.taken, "skipped_steps": self._watch.skipped, **self._watch.figures()}

    @property
    def advantages(self) -> list[float]:
        """(B,) of the rows of the last step."""
        return self._trainer.advantages

    def save(self, folder: Path) -> None:
        """Write TRL's checkpoint, with which `GRPOTrainer.train(resume_from_checkpoint=)` goes on, into a folder.

        Raises:
            OSError: it cannot be written.
        """
        place = self._folder / f"checkpoint-{self._trainer.state.global_step}"
        shutil.rmtree(place, ignore_errors=True)
        private_folder(self._folder)
        with no_progress_bar():
            self._trainer._save_checkpoint(self._trainer.model, None)
        for path in list(place.iterdir()):
            shutil.move(path, folder / path.name)
        shutil.rmtree(place, ignore_errors=True)

    def stop(self) -> None:
        """End the thread. May be called twice."""
        if self._thread is not None:
            self._given.put(_STOP)
            self._thread.join()
            self._thread = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self) -> None:
        error = self._waiting.get()
        if error is not None:
            raise error

    def _train(self) -> None:
        end: BaseException | None = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._trainer.train(resume_from_checkpoint=None if self._resume is None else str(self._resume))
            self._trainer.model.eval()
        except _Stopped:
            return
        except BaseException as error:  # the boundary of the thread: whoever waits raises it
            end = error
        self._waiting.put(end)

    def _next_rows(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: wait for the rows of a step."""
        self._trainer.model.eval()
        self._waiting.put(None)
        rows = self._given.get()
        if rows is None:
            raise _Stopped
        assert len(rows.prompt_ids) == len(prompts), (len(rows.prompt_ids), len(prompts))
        self._trainer.rows = rows
        self._trainer.model.train()
        return rows.output()


class _silenced:
    """Keeps TRL from telling that `rollout_func` is experimental: the version is pinned."""

    _NAME = "TRL_EXPERIMENTAL_SILENCE"

    def __enter__(self) -> None:
        self._before = os.environ.get(self._NAME)
        os.environ[self._NAME] = "1"

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del os.environ[self._NAME]
        else:
            os.environ[self._NAME] = self._before
