"""Loads the policies of a run, as its model or a checkpoint has them; adapters on the same model share its weights."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentlightning.engine.served import load_model
from agentlightning.training.checkpoint.weights import fingerprint_of, load_policy, save_policy
from agentlightning.training.learner.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentlightning.training.checkpoint.folder import Checkpoint
    from agentlightning.training.policies.learners import Learners
    from agentlightning.training.settings import GRPOSettings

POLICIES: Final = "policies"
"""Folder within a checkpoint that has one folder for each policy, where there are several."""


def load_policies(settings: GRPOSettings, checkpoint: Checkpoint | None) -> dict[str | None, Policy]:
    """Return the policies of a run by name as a checkpoint holds them; None is what it begins with.

    Policies with adapters on one and the same model share its weights, which do not learn: they are in memory once.

    Raises:
        BrokenCheckpointError: what is read is not what was written.
    """
    shared: dict[tuple[str, bool], PreTrainedModel] = {}
    policies: dict[str | None, Policy] = {}
    for name, own in settings.by_policy().items():
        place = None if checkpoint is None else folder_of(checkpoint.path, name)
        base: PreTrainedModel | None = None
        if name is not None and own.lora is not None:
            key = own.model, own.bf16
            if key not in shared:
                shared[key] = load_model(own.model, bf16=own.bf16, device=own.device)
            base = twin_of(shared[key])
        facts: Mapping[str, Any] = {} if checkpoint is None else checkpoint.facts
        digest = facts["digest"] if place is not None and name is None else facts.get("digests", {}).get(name, "")
        policies[name] = load_policy(
            own, place, weight_version=facts.get("weight_version", 0), digest=digest, base=base
        )
    return policies


def save_policies(learners: Learners, folder: Path) -> None:
    """Write every policy into a checkpoint.

    Raises:
        OSError: a file cannot be written, as on a full disk.
    """
    for each in learners.all:
        place = folder_of(folder, each.name)
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        save_policy(each.policy, place)


def folder_of(checkpoint: Path, name: str | None) -> Path:
    """Return where a policy lies in a checkpoint."""
    return checkpoint if name is None else checkpoint / POLICIES / name


def fingerprint_of_models(settings: GRPOSettings) -> str:
    """Return the digest of the files of every model that the run begins with; see `fingerprint_of`."""
    models = list(dict.fromkeys(own.model for own in settings.by_policy().values()))
    found = [fingerprint_of(model) for model in models]
    return found[0] if len(found) == 1 else hashlib.sha256("\n".join(found).encode()).hexdigest()


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of its own layers whose numbers are those of `model`, in the same memory."""
    numbers = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in numbers})
