"""Finds the trained model that a name stands for, and loads it: a checkpoint, a run's newest one, a model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentlightning.errors import BadRequestError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.training.checkpoint.folder import MANIFEST, CheckpointFolder, read_checkpoint
from agentlightning.training.checkpoint.resume import CHECKPOINTS
from agentlightning.training.checkpoint.weights import ADAPTER, fingerprint_of, model_in, restore_policy
from agentlightning.training.learner.policy import Policy
from agentlightning.training.records import RunLog


@dataclass(frozen=True)
class Trained:
    """Where a trained model lies."""

    path: Path
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What its checkpoint says of it; empty for the folder of a plain transformers model."""

    @property
    def has_adapter(self) -> bool:
        """True if only an adapter was trained."""
        return (self.path / ADAPTER).is_file()

    def load(self) -> Policy:
        """Load it.

        Raises:
            BadRequestError: the model below its adapter is not the one that it was trained on.
        """
        if not self.facts:
            return Policy.load(self.path)
        settings = self.facts["settings"]
        if "trl" in settings and self.has_adapter:
            raise BadRequestError(
                f"The adapter in {str(self.path)!r} was trained by TRL: peft reads it as it is, and the folder model "
                "of its run holds the model with the adapter added"
            )
        if "trl" in settings:
            return Policy.load(self.path)
        if self.has_adapter and fingerprint_of(settings["model"]) != self.facts["model_files"]:
            raise BadRequestError(
                f"The adapter in {str(self.path)!r} was trained on model={settings['model']!r}, whose files are not "
                "there, or are not what they were"
            )
        policy = Policy.load(model_in(self.path, settings["model"]), lora=settings["lora"], seed=settings["seed"])
        restore_policy(policy, self.path, weight_version=self.facts["weight_version"], digest=self.facts["digest"])
        return policy


def trained_in(folder: str | Path) -> Trained:
    """Return the trained model in a folder: a checkpoint, a run (its newest good checkpoint), or a model.

    Raises:
        BadRequestError: it is none of these, or broken.
    """
    path = Path(folder)
    if (path / MANIFEST).is_file():
        return _of_one_policy(Trained(path, read_checkpoint(path).facts))
    if (found := CheckpointFolder(path / CHECKPOINTS).last_good()) is not None:
        return _of_one_policy(Trained(found.path, found.facts))
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return Trained(path)
    raise BadRequestError(
        f"{str(path)!r} is no checkpoint, no folder of a run that has one, and no folder of a transformers model"
    )


def _of_one_policy(found: Trained) -> Trained:
    """Return it, if its run has one policy."""
    if names := found.facts.get("digests"):
        models = Path(found.facts["folder"]) / "model"
        raise BadRequestError(
            f"{str(found.path)!r} holds several policies: {', '.join(names)}. Name the model of one, which the end of "
            f"the run has written: {str(models / next(iter(names)))!r}"
        )
    return found


async def trained_by(store: LightningStore, run_id: str) -> Trained:
    """Return the newest checkpoint of a run that a store knows.

    Raises:
        NotFoundError: the store has no such run, or the run has no checkpoint.
        BadRequestError: it is not on this machine, or broken.
    """
    record = await RunLog(store, run_id).latest("checkpoint")
    if record is None:
        raise NotFoundError(f"The store knows no checkpoint of a run {run_id!r}; agl runs list shows its runs")
    return _trained_by(run_id, Path(record.data["path"]))


def _trained_by(run_id: str, path: Path) -> Trained:
    if not path.is_dir():
        raise BadRequestError(
            f"The newest checkpoint of run {run_id!r} was written to {str(path)!r}, where no folder is now. If it was "
            "moved, give its folder, or that of the run, in place of the run's id"
        )
    return trained_in(path)
