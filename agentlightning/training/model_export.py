"""A trained model found by a name and written in the forms that other programs read: merged, adapter, GGUF."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentlightning.errors import BadRequestError, NotFoundError
from agentlightning.private_files import private_folder
from agentlightning.store.base import LightningStore
from agentlightning.training.checkpoint import CHECKPOINTS, MANIFEST, CheckpointFolder, read_checkpoint
from agentlightning.training.gguf_file import write_gguf
from agentlightning.training.learner.policy import Policy
from agentlightning.training.policy_files import ADAPTER, fingerprint_of, model_in, restore_policy
from agentlightning.training.records import RunLog

ExportFormat = Literal["merged", "adapter", "gguf"]
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.*", "merges.txt")


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


def export(trained: Trained, form: ExportFormat, out: str | Path) -> list[str]:
    """Write a trained model into a new folder, whole or not at all, and return the names of its files.

    `merged`: a transformers model, adapters added to its weights. `adapter`: what peft reads. `gguf`: one file for
    llama.cpp and others, with the weights in their own precision.

    Raises:
        BadRequestError: the folder holds something, or the model cannot be written in this form; says why.
        MissingExtraError: the package `gguf` is not installed.
    """
    place = Path(out)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise BadRequestError(f"{str(place)!r} is there already and not empty; choose another place")
    if form == "adapter" and not trained.has_adapter:
        raise BadRequestError(
            f"{str(trained.path)!r} has no adapter: all weights were trained; use the format 'merged'"
        )
    private_folder(place.absolute().parent)
    unfinished = place.absolute().parent / f".{place.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    try:
        _FILL[form](trained, unfinished)
        if place.exists():
            place.rmdir()
        os.rename(unfinished, place)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return sorted(path.name for path in place.iterdir())


def _merged(trained: Trained, folder: Path) -> None:
    trained.load().save(folder)


def _adapter(trained: Trained, folder: Path) -> None:
    for name in _ADAPTER_FILES:
        shutil.copyfile(trained.path / name, folder / name)
    for pattern in _TOKENIZER_FILES:
        for file in trained.path.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def _gguf(trained: Trained, folder: Path) -> None:
    policy = trained.load()
    write_gguf(policy.merged(), folder / "model.gguf")
    policy.tokenizer.save_pretrained(folder)


_FILL = {"merged": _merged, "adapter": _adapter, "gguf": _gguf}
