"""A run that VERL trains and serves. The loop of the run collects the rollouts; VERL's processes learn from them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from omegaconf import OmegaConf
from typing_extensions import override

from agentlightning.adapter.calls.calls import model_calls
from agentlightning.adapter.rows.samples import Sample, samples_from_calls
from agentlightning.base.terminal import counted
from agentlightning.errors import BadRequestError
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.base import LightningStore
from agentlightning.training.checkpoint import Checkpoint
from agentlightning.training.external.remote import RemoteEngine, RemotePolicy, RemoteUpdater
from agentlightning.training.external.verl.adapters import copy_newest_model
from agentlightning.training.external.verl.bridge import Row
from agentlightning.training.external.verl.session import VERLSession
from agentlightning.training.external.verl.settings import VERLSettings
from agentlightning.training.external.verl.trainer import OURS
from agentlightning.training.progress import make_progress
from agentlightning.training.result import Evaluation, GRPOResult
from agentlightning.training.resume import OpenRun
from agentlightning.training.rollouts import Evidence, evidence
from agentlightning.training.rows import StepRows
from agentlightning.training.run import train
from agentlightning.training.run_inputs import RunSource, triplet_adapter
from agentlightning.training.serving import entry_of
from agentlightning.training.settings import GRPOSettings
from agentlightning.training.tasks import items_of
from agentlightning.training.updater import StepUpdate
from agentlightning.types import Dataset

logger = logging.getLogger(__name__)

PLACE: Final = "verl.json"
"""File in a checkpoint with the path of VERL's own checkpoint."""
_FIGURES: Final = {
    "actor/pg_loss": "loss",
    "actor/loss": "loss",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/ppo_kl": "approx_kl",
    "actor/kl_loss": "kl",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    f"{OURS}update_kl": "update_kl",
    f"{OURS}first_ratio_error": "first_ratio_error",
    "training/rollout_probs_diff_max": "sampler_difference",
}
"""VERL's names of the metrics of an update, and our names."""


async def run_verl(
    source: RunSource, settings: VERLSettings, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None
) -> GRPOResult:
    """Train with VERL's trainer; see `VERL.run`."""
    tasks, held_out = items_of(train_dataset), items_of(val_dataset)
    config = _scheduled(settings, len(tasks), len(held_out))
    grpo = VERLSettings(config=config, user_settings=settings.user_settings).as_grpo(len(tasks))
    triplet_adapter(source)  # before anything is loaded
    longest = config.data.max_prompt_length + config.data.max_response_length
    policy = await asyncio.to_thread(RemotePolicy, grpo.model, longest, "actor_rollout_ref.model.path")

    async def make_updater(opened: OpenRun, stack: AsyncExitStack) -> VERLUpdater | None:
        resume, folder = opened.resume, opened.folder.path.resolve() / "verl"
        if resume.checkpoint is not None:
            policy.weight_version = resume.checkpoint.facts["weight_version"]
            if resume.steps >= grpo.max_steps:  # VERL would end before it serves
                copy_newest_model(folder, opened.folder.model)
                if not resume.state["evaluated"]:
                    text = "The last evaluation is missing: the run ended before it, and VERL has stopped serving"
                    logger.warning(text)
                return None
        resumed = _resumed(config, resume.checkpoint)
        served = dataclasses.asdict(policy.served_as(grpo, "agl.VERL")) | {"eos_ids": sorted(policy.eos_ids)}
        link = {"served": served, "tells_tokens": grpo.record_tokens != "none"}
        session = VERLSession(resumed, link, folder, steps=grpo.max_steps, held_out=len(held_out))
        stack.push_async_callback(asyncio.to_thread, session.stop)
        await asyncio.to_thread(session.start)
        if grpo.progress != "none":
            make_progress("plain").note("VERL is starting its processes and loading the model")
        updater = VERLUpdater(policy, grpo, session, (await asyncio.to_thread(session.call, "addresses"))[0])
        updater.evaluates_first = bool(config.trainer.val_before_train)
        return updater

    recorded = settings.recorded()
    sections = {"verl": recorded, "grpo": grpo.as_json()}
    return await train(source, grpo, tasks, held_out, make_updater, config=sections, facts={"verl": recorded})


def _scheduled(settings: VERLSettings, tasks: int, held_out: int) -> Any:
    """Return the configuration, with a validation if there are held-out tasks."""
    config = settings.config
    if not tasks:
        raise BadRequestError("VERL needs tasks: pass train_dataset to fit, with at least one task")
    if not held_out:
        if config.trainer.test_freq > 0:
            raise BadRequestError(
                f"trainer.test_freq={config.trainer.test_freq} has no effect without validation tasks: pass "
                "val_dataset to fit, or omit it"
            )
        return OmegaConf.merge(config, {"trainer": {"val_before_train": False, "test_freq": -1}})
    every = config.trainer.test_freq if config.trainer.test_freq > 0 else settings.steps(tasks)
    return OmegaConf.merge(config, {"trainer": {"test_freq": every}})


def _resumed(config: Any, checkpoint: Checkpoint | None) -> Any:
    """Return the configuration that resumes from the checkpoint of an earlier start."""
    if checkpoint is None:
        return OmegaConf.merge(config, {"trainer": {"resume_mode": "disable"}})
    place = json.loads((checkpoint.path / PLACE).read_text())["path"]
    resume = {"resume_mode": "resume_path", "resume_from_path": place, "val_before_train": False}
    return OmegaConf.merge(config, {"trainer": resume})


class VERLUpdater(RemoteUpdater):
    """Passes the rows of each step and evaluation to VERL."""

    updates_without_rows = True  # VERL counts every step

    def __init__(self, policy: RemotePolicy, settings: GRPOSettings, session: VERLSession, base_url: str) -> None:
        super().__init__(policy, settings, RemoteEngine(base_url, session.token), name=session.name)
        self._session, self._settings = session, settings
        self._filler = min(policy.eos_ids)
        self.saves_every = session.saves_every

    @override
    async def before_step(self, proxy: LLMProxy) -> None:
        """Distribute the gateway's calls over the agent loop workers that serve the model."""
        addresses = await asyncio.to_thread(self._session.call, "addresses")
        if len(addresses) != len(self.engines):
            self.engines = tuple(RemoteEngine(address, self._session.token) for address in addresses)
            models: list[Any] = [each for each in proxy.model_list if each["model_name"] != RemoteEngine.model_name]
            proxy.update_model_list([*models, *(entry_of(engine, self._settings) for engine in self.engines)])

    @override
    def update_weights(self, step: int, rows: StepRows) -> StepUpdate:
        settings, count = self._settings, len(rows.samples)
        of_step = rows_of_step(rows, settings.batch_size, settings.num_generations, filler=self._filler)
        self._session.call("give", "train", step, of_step, not count)
        report = self._session.call("step", step)
        metrics = report["metrics"]
        figures = {name: metrics[of_verl] for of_verl, name in _FIGURES.items() if of_verl in metrics}
        figures |= {"rows": count, "tokens": sum(sum(sample.mask) for sample in rows.samples)}
        figures |= {"steps": report["optimizer_steps"], "skipped_steps": report["skipped_steps"]}
        reported = reported_rows(report, rows, settings.num_generations)
        rows.advantages[:] = [0.0 if row is None else float(row["advantage"][0]) for row in reported]
        update = StepUpdate(figures)
        lost = {sample.rollout_id for sample, row in zip(rows.samples, reported, strict=True) if row is None}
        if lost:
            text = f"VERL excluded {counted(len(lost), 'rollout')}, such as {min(lost)}. See VERL's log for the reason"
            update.untrained, update.alarms = frozenset(lost), [("left_out_by_verl", text)]
        if report["optimizer_steps"]:
            self.advance(self.weight_version + 1)
            update.changed = frozenset((None,))
            if not lost and settings.record_tokens != "none":
                update.rows = [row or {} for row in reported]
        return update

    @override
    async def after_evaluation(self, step: int, evaluation: Evaluation, store: LightningStore) -> None:
        """Pass the rollouts of the evaluation to VERL's validation."""
        rollouts = await store.query_rollouts(rollout_id_in=evaluation.rollout_ids)
        by_id = {rollout.rollout_id: rollout for rollout in rollouts}
        ended = [await evidence(store, by_id[rollout_id]) for rollout_id in evaluation.rollout_ids]
        rows = rows_of_evaluation(ended, evaluation.rewards, filler=self._filler)
        await asyncio.to_thread(self._session.call, "give", "val", step, rows)

    @override
    def can_save(self, step: int, weight_version: int) -> bool:
        return self._session.checkpoint(step) is not None

    @override
    def save_checkpoint(self, folder: Path, step: int) -> None:
        (folder / PLACE).write_text(json.dumps({"path": str(self._session.checkpoint(step))}))

    @override
    def save_model(self, folder: Path) -> None:
        copy_newest_model(self._session.folder, folder)

    @override
    async def end(self) -> None:
        await asyncio.to_thread(self._session.wait_for_end)


# --- the token rows that VERL is given, by task and session, and the figures that it reports of each ------------------


def rows_of_step(rows: StepRows, tasks: int, sessions: int, *, filler: int) -> list[list[list[Row]]]:
    """Return the rows of a training step that have an advantage.

    VERL uses the reward of a single rollout of a task as its advantage, and rounding errors for equal rewards. The
    ledger excludes both from training, so such rows are not passed to VERL.

    Args:
        filler: a token id. A step without trained rows needs one row; its update is skipped.
    """
    trained = {sample.rollout_id for sample in rows.samples}
    by_place: list[list[list[Row]]] = [[[] for _ in range(sessions)] for _ in range(tasks)]
    for number, record in enumerate(rows.records[: tasks * sessions]):
        if record.rollout_id in trained:
            place, session = divmod(number, sessions)
            reward, calls = record.reward or 0.0, len(record.calls)
            by_place[place][session] = [_row(sample, reward, calls) for sample in record.samples]
    if not trained:
        by_place[0][0] = [_filler(filler, 0.0)]
    return by_place


def rows_of_evaluation(
    evidence: Sequence[Evidence], rewards: Sequence[float | None], *, filler: int
) -> list[list[list[Row]]]:
    """Return the rows of an evaluation: one session for each held-out task; a missing reward is 0."""
    by_place: list[list[list[Row]]] = []
    for rollout, reward in zip(evidence, rewards, strict=True):
        calls = model_calls(rollout.counted)
        rows = [_row(sample, reward or 0.0, len(calls)) for sample in samples_from_calls(calls).samples]
        by_place.append([rows or [_filler(filler, reward or 0.0)]])
    return by_place


def reported_rows(report: Mapping[str, Any], rows: StepRows, sessions: int) -> list[Mapping[str, Any] | None]:
    """Return VERL's values of each row: (B,), None if it excluded the row."""
    by_place: dict[tuple[int, int, int], Mapping[str, Any]] = {}
    for key, columns in report["rows"].items():
        uid, session, index = key.rsplit("_", 2)
        by_place[report["places"][uid], int(session), int(index)] = columns
    keys = {
        id(sample): (*divmod(number, sessions), index)
        for number, record in enumerate(rows.records)
        for index, sample in enumerate(record.samples)
    }
    return [by_place.get(keys[id(sample)]) for sample in rows.samples]


def _row(sample: Sample, reward: float, calls: int) -> Row:
    first = sample.mask.index(1)
    return {
        "prompt_ids": sample.token_ids[:first],
        "response_ids": sample.token_ids[first:],
        "response_mask": sample.mask[first:],
        "logprobs": sample.logprobs[first:],
        "reward": reward,
        "versions": [version for version in sample.weight_versions if version >= 0],
        "calls": calls,
    }


def _filler(token: int, reward: float) -> Row:
    one = {"prompt_ids": [token], "response_ids": [token], "response_mask": [1], "logprobs": [0.0]}
    return {**one, "reward": reward, "versions": [], "calls": 0}
