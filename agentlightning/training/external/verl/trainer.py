"""VERL's synchronous trainer, which says after each step what its update was like. Loaded in VERL's processes."""

from __future__ import annotations

import math
import numbers
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import open_dict
from torch import Tensor
from typing_extensions import override
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.utils.padding import response_from_nested

from agentlightning.training.learner.update import measured_rows
from agentlightning.training.losses.kl import update_figures

NAME = "agentlightning"
OURS = "agentlightning/"
"""Begins the names of figures among VERL's that we measure."""


@register_trainer(NAME)
class StepTrainer(PPOTrainerSync):
    """The steps are VERL's; the loop of the run is told of each, once its weights are served."""

    def __init__(self, config: Any) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # which VERL asks for by name
        super().__init__(config)
        self._told: dict[str, Any] = {}

    @override
    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        mask = self._columns(batch, ["response_mask"])["response_mask"].bool()  # (B, T), before VERL rejects tokens
        batch = super()._compute_advantage(batch, metrics)
        columns = self._columns(batch, list(names := self._figures()))
        self._told["advantages"], self._told["tokens"] = {}, {}
        for row, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
            if tag.get("is_padding", False):
                continue
            own = {ours: columns[theirs][row][mask[row]].float().numpy() for theirs, ours in names.items()}
            self._told["advantages"][key] = float(own["advantage"][0])  # the same on every token of a session
            if len(own) > 1:
                self._told["tokens"][key] = own
        return batch

    def _figures(self) -> dict[str, str]:
        """Return VERL's names of what is told of each token, and ours."""
        told = {"advantages": "advantage"}
        if not self.config.agentlightning_link.tells_tokens:
            return told
        told["rollout_log_probs"] = "engine_logprobs"
        if (self.config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False):
            return told  # then the learner computes none of its own before the loss
        return told | {"old_log_probs": "trainer_logprobs", "entropy": "entropy"}

    @staticmethod
    def _columns(batch: Any, names: list[str]) -> Any:
        """Return fields of the batch, padded: (B, T) each."""
        return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names).to_padded_tensor()

    @override
    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if ray.get(self._bridge().skips.remote(self.global_steps)):
            self._told |= {"metrics": {}, "optimizer_steps": 0, "skipped_steps": 0}
            return batch
        workers, norms = self.actor_rollout_wg, list[float]()
        measured = self._measured(batch)
        engine, before = self._logprobs(measured)
        self.actor_rollout_wg = _Heard(workers, norms)
        try:
            batch = super()._update_actor(batch, metrics)
        finally:
            self.actor_rollout_wg = workers
        figures = update_figures(engine, before, self._logprobs(measured)[1])
        metrics.update({OURS + name: value for name, value in figures.items()})
        self._told["optimizer_steps"] = sum(map(math.isfinite, norms))
        self._told["skipped_steps"] = len(norms) - self._told["optimizer_steps"]
        self._told["metrics"] = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, numbers.Real) and math.isfinite(value)
        }
        return batch

    def _measured(self, batch: Any) -> Any:
        """Return rows of the batch on which the distance of an update is measured, as many for each worker."""
        mask = self._columns(batch, ["response_mask"])["response_mask"]
        own = [place for place, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        chosen = [own[number] for number in measured_rows(mask.sum(dim=1)[own].tolist())]
        others = sorted(set(range(len(batch.keys))) - set(chosen))
        chosen += others[: -len(chosen) % self.actor_rollout_wg.world_size]  # all of them, where there are too few
        part = batch.select_keys([batch.keys[place] for place in sorted(chosen)])
        temperature = self.config.actor_rollout_ref.rollout.temperature
        part.extra_info.update(calculate_entropy=False, compute_loss=False, temperature=temperature)
        return part

    def _logprobs(self, part: Any) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each trained token, of the engine and under the workers' weights: (N,) each."""
        self.actor_rollout_wg.compute_log_prob(part)
        names = ["log_probs", "response_mask", "rollout_log_probs"]
        columns = tq.kv_batch_get(keys=part.keys, partition_id=part.partition_id, select_fields=names)
        mask = columns["response_mask"]
        own = response_from_nested(columns["log_probs"], mask)
        engine, before = (each.values()[mask.values().bool()].float() for each in (columns["rollout_log_probs"], own))
        return engine, before

    @override
    def on_step_end(self) -> None:
        super().on_step_end()  # the new weights are served from here on
        told, self._told = self._told, {}
        ray.get(self._bridge().stepped.remote(self.global_steps, told))

    def _bridge(self) -> Any:
        link = self.config.agentlightning_link
        return ray.get_actor(link.bridge, namespace=link.namespace)


class _Heard:
    """VERL's workers, whose updates also say the norm of the gradient of each of their optimizer's steps.

    VERL takes no such step where the norm is not finite, and gives only the mean of them.
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
    """VERL's task runner, in whose process the trainer above is known by its name."""
