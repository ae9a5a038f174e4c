"""The synchronous trainer in VERL's trainer process, which reports each step, and its dataset."""

from __future__ import annotations

import math
import numbers
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import open_dict
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.utils.padding import response_from_nested

from agentlightning.training.learner.figures import measured_rows
from agentlightning.training.losses.kl import update_figures

NAME = "agentlightning"
OURS = "agentlightning/"
"""Prefix of the metrics that this module adds to VERL's."""


class PlacesOfSteps(Dataset[dict[str, Any]]):
    """A dataset with the positions of the tasks in each step instead of prompts, because the run holds the tasks.

    One row for each task of each step, in order. `data.train_files` and `data.val_files` are `train:COUNT` and
    `val:COUNT`.
    """

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        name = data_files if isinstance(data_files, str) else data_files[0]
        self._part, _, count = str(name).partition(":")
        self._count = int(count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "agl_part": self._part,
            "index": index,
            "raw_prompt": [],
            "data_source": "agentlightning",
            "reward_model": {"ground_truth": ""},
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
        }


@register_trainer(NAME)
class StepTrainer(PPOTrainerSync):
    """VERL's trainer, which reports each step to the loop of the run when its weights are served."""

    def __init__(self, config: Any) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # VERL requests it by name
        super().__init__(config)
        link = config.agentlightning_link
        self._bridge = ray.get_actor(link.bridge, namespace=link.namespace)
        self._report: dict[str, Any] = {}

    @override
    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        mask = _columns(batch, ["response_mask"])["response_mask"].bool()  # (B, T), before VERL rejects tokens
        batch = super()._compute_advantage(batch, metrics)
        names = self._token_figures()
        columns = _columns(batch, list(names))
        self._report["rows"] = {
            key: {name: columns[of_verl][row][mask[row]].float().numpy() for of_verl, name in names.items()}
            for row, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True))
            if not tag.get("is_padding", False)
        }
        return batch

    def _token_figures(self) -> dict[str, str]:
        """Return VERL's names of the reported token figures, and ours."""
        names = {"advantages": "advantage"}
        if not self.config.agentlightning_link.tells_tokens:
            return names
        names["rollout_log_probs"] = "engine_logprobs"
        if (self.config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False):
            return names  # then the learner computes none of its own before the loss
        return names | {"old_log_probs": "trainer_logprobs", "entropy": "entropy"}

    @override
    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if ray.get(self._bridge.skips.remote(self.global_steps)):
            self._report |= {"metrics": {}, "optimizer_steps": 0, "skipped_steps": 0}
            return batch
        workers, norms = self.actor_rollout_wg, list[float]()
        measured = self._measured(batch)
        engine, before = self._logprobs(measured)
        self.actor_rollout_wg = _Workers(workers, norms)
        try:
            batch = super()._update_actor(batch, metrics)
        finally:
            self.actor_rollout_wg = workers
        figures = update_figures(engine, before, self._logprobs(measured)[1])
        metrics.update({OURS + name: value for name, value in figures.items()})
        steps = sum(map(math.isfinite, norms))
        self._report |= {"optimizer_steps": steps, "skipped_steps": len(norms) - steps}
        self._report["metrics"] = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, numbers.Real) and math.isfinite(value)
        }
        return batch

    def _measured(self, batch: Any) -> Any:
        """Return rows of the batch that measure the distance of an update, equally many for each worker."""
        mask = _columns(batch, ["response_mask"])["response_mask"]
        own = [place for place, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        places = [own[number] for number in measured_rows(mask.sum(dim=1)[own].tolist())]
        others = sorted(set(range(len(batch.keys))) - set(places))
        places += others[: -len(places) % self.actor_rollout_wg.world_size]  # all of them, if there are too few
        part = batch.select_keys([batch.keys[place] for place in sorted(places)])
        temperature = self.config.actor_rollout_ref.rollout.temperature
        part.extra_info.update(calculate_entropy=False, compute_loss=False, temperature=temperature)
        return part

    def _logprobs(self, part: Any) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the trained tokens from the engine and the workers' weights: (N,) each."""
        self.actor_rollout_wg.compute_log_prob(part)
        names = ["log_probs", "response_mask", "rollout_log_probs"]
        columns = tq.kv_batch_get(keys=part.keys, partition_id=part.partition_id, select_fields=names)
        mask = columns["response_mask"]
        own = response_from_nested(columns["log_probs"], mask)
        trained = mask.values().bool()
        return columns["rollout_log_probs"].values()[trained].float(), own.values()[trained].float()

    @override
    def on_step_end(self) -> None:
        super().on_step_end()  # the new weights are served from here on
        report, self._report = self._report, {}
        ray.get(self._bridge.stepped.remote(self.global_steps, report))


def _columns(batch: Any, names: list[str]) -> Any:
    """Return fields of a batch, padded: (B, T) each."""
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names).to_padded_tensor()


class _Workers:
    """VERL's workers, whose updates also add the norm of the gradient of each of their optimizer's steps to a list.

    VERL skips a step if the norm is not finite, and returns only the mean of the norms.
    """

    def __init__(self, workers: Any, norms: list[float]) -> None:
        self._workers, self._norms = workers, norms

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workers, name)

    def update_actor(self, batch: Any) -> Any:
        output = self._workers.update_actor(batch)
        self._norms += [float(norm) for norm in output["metrics"]["grad_norm"]]
        return output


_Runner: Any = TaskRunnerV1.__ray_actor_class__  # pyright: ignore[reportAttributeAccessIssue]


class TaskRunner(_Runner):
    """VERL's task runner. It registers the trainer above by name in its process."""
