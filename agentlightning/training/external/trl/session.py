"""TRL's trainer on its own thread, which waits for rows, learns from them, and waits for the next ones.

`GRPOTrainer.train` is one long call that requests the rows of each step from `rollout_func`. Here that function waits
until the loop of the run has collected rows, so the loop controls when each step begins. Between two calls of `learn`
the thread waits in `rollout_func`, and every other thread may read the weights.
"""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Queue
from typing import Any, Final

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, ProgressCallback, TrainerCallback
from trl import GRPOTrainer  # pyright: ignore[reportAttributeAccessIssue] -- it takes the module beside this one
from typing_extensions import override

from agentlightning.base.private_files import private_folder
from agentlightning.engine.torch_setup import no_progress_bar
from agentlightning.training.external.trl.rows import TRLRow, as_output
from agentlightning.training.external.trl.settings import TRLSettings

_FIGURES: Final = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/region_mean": "clip_fraction",
}
"""Names of the metrics in TRL's log, and our names."""


class _Stopped(BaseException):
    """Ends `GRPOTrainer.train` from within `rollout_func`."""


class _Trainer(GRPOTrainer):
    """TRL's trainer, which also keeps the advantage of each row."""

    rows: Sequence[TRLRow]
    advantages: list[float]

    @override
    def _generate_and_score_completions(self, inputs: Any) -> Any:  # pyright: ignore[reportGeneralTypeIssues] -- its base is unknown here
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        trained = torch.tensor([row.is_trained for row in self.rows], device=output["advantages"].device)
        output["advantages"] = torch.where(trained, output["advantages"], 0.0)  # (B,), equal rewards: exactly zero
        self.advantages = output["advantages"].tolist()
        return output


class _Watch(TrainerCallback):
    """Discards gradients that are not finite, and collects the figures of the steps."""

    def __init__(self) -> None:
        self.logs: list[Mapping[str, Any]] = []
        self.taken = self.skipped = 0

    @override
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            self.taken += 1
        else:
            self.skipped += 1
            model.zero_grad(set_to_none=True)  # parameters without a gradient do not change

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs or {}))

    def take_figures(self) -> dict[str, float]:
        """Return the metrics of the optimizer steps since the last call: counts, and means of TRL's logged metrics."""
        figures: dict[str, float] = {"steps": self.taken, "skipped_steps": self.skipped}
        for of_trl, name in _FIGURES.items():
            values = [float(log[of_trl]) for log in self.logs if of_trl in log]
            if values:
                figures[name] = sum(values) / len(values)
        self.logs, self.taken, self.skipped = [], 0, 0
        return figures


class TRLSession:
    """One `GRPOTrainer` on its thread. `start`, `learn`, `save` and `stop` belong to one caller at a time."""

    def __init__(self, settings: TRLSettings, folder: Path, *, steps: int, resume: Path | None) -> None:
        """Create the trainer for a number of steps, optionally from TRL's checkpoint; `stop` removes `folder`.

        Raises:
            ValueError, ImportError: TRL rejects a setting.
        """
        config = settings.config
        config.output_dir = str(folder)
        config.max_steps = steps * settings.updates
        config.mask_truncated_completions = False  # the gateway knows better which rows were cut; see trl_rows
        config.logging_strategy, config.logging_steps = type(config.logging_strategy)("steps"), 1
        config.save_strategy = type(config.save_strategy)("no")
        config.model_init_kwargs = {"trust_remote_code": False, **(config.model_init_kwargs or {})}
        tasks = settings.rollouts // int(config.num_generations or 1)
        tokenizer = AutoTokenizer.from_pretrained(settings.model, local_files_only=True, trust_remote_code=False)
        self._resume, self._folder = resume, folder
        self._watch = _Watch()
        with warnings.catch_warnings(), no_progress_bar():
            warnings.simplefilter("ignore")
            self._trainer = _Trainer(
                model=settings.model,
                reward_funcs=[_rewards_of],
                args=config,
                train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(tasks)]),
                processing_class=tokenizer,
                peft_config=settings.peft_config,
                rollout_func=self._next_rows,
                callbacks=[self._watch],
            )
        self._trainer.remove_callback(PrinterCallback)  # the run shows its steps itself
        self._trainer.remove_callback(ProgressCallback)
        self._rows: Queue[Sequence[TRLRow] | None] = Queue()
        """The rows of the next step; None ends the thread."""
        self._waiting: Queue[BaseException | None] = Queue()
        """Receives None whenever TRL waits for rows, or the error that ended the thread."""
        self._thread: threading.Thread | None = None

    @property
    def model(self) -> Any:
        """The live weights; in evaluation mode except during an update."""
        return self._trainer.model

    def start(self) -> None:
        """Start, or resume from the checkpoint; return when the weights are loaded and TRL waits for rows."""
        self._thread = threading.Thread(target=self._train, name="agl-trl", daemon=True)
        self._thread.start()
        self._wait()

    def learn(self, rows: Sequence[TRLRow]) -> tuple[dict[str, float], list[float]]:
        """Train on the rows of a step, (B,); return TRL's metrics and the advantage of each row, (B,)."""
        self._rows.put(rows)
        self._wait()
        return self._watch.take_figures(), self._trainer.advantages

    def save(self, folder: Path) -> None:
        """Write TRL's checkpoint, for `GRPOTrainer.train(resume_from_checkpoint=)`, into a folder."""
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
            self._rows.put(None)
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
        except BaseException as error:  # the boundary of the thread: its caller raises it
            end = error
        self._waiting.put(end)

    def _next_rows(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Wait for the rows of a step: TRL's `rollout_func`."""
        self._trainer.model.eval()
        self._waiting.put(None)
        rows = self._rows.get()
        if rows is None:
            raise _Stopped
        assert len(rows) == len(prompts), (len(rows), len(prompts))
        self._trainer.rows = rows
        self._trainer.model.train()
        return as_output(rows)


def _rewards_of(completions: Sequence[object], agl_reward: Sequence[float | None], **_: object) -> list[float | None]:
    """Return the rewards that the rows already have: TRL's reward function."""
    return list(agl_reward)
