"""The search that a `run_dir` holds, as the package has saved it."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from gepa.core.state import GEPAState
from typing_extensions import override

from agentlightning.errors import BadRequestError
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.types import PromptTemplate

_STATE = "gepa_state.bin"
REWARDS = "agentlightning_rewards"
"""In the adapter's part of the state: rewards of the validation tasks by the digest of the candidate."""
TASKS = "agentlightning_validation"
"""In the same place: digest of the validation tasks, in their order, which the package knows by their numbers only."""


@dataclass(frozen=True, slots=True)
class SavedSearch:
    """What a search that goes on needs of an earlier start."""

    candidates: Sequence[dict[str, str]]
    """In the order in which they were accepted; the seed is the first."""
    parents: Sequence[Sequence[int | None]]
    """Of each candidate, by their places."""
    seed_scores: Mapping[int, float]
    """Of the seed on the validation tasks, as the package had them."""
    rewards: Mapping[str, list[float | None]]
    """Of each candidate on the validation tasks, by its digest; None where a task earned nothing."""


class _DataOnly(pickle.Unpickler):
    """Reads what the package writes, lists and texts and numbers, and calls nothing."""

    @override
    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(
            f"it names {module_name}.{global_name}; expected data alone, a program may be hidden in it"
        )


def digest_of_tasks(tasks: Sequence[Any]) -> str:
    """Return what equal tasks in the same order have in common."""
    return hashlib.sha256("\n".join(tasks_of(tasks)).encode()).hexdigest()[:32]


def read_saved(run_dir: Path, seeds: Mapping[str, PromptTemplate], val: Sequence[Any]) -> SavedSearch | None:
    """Return the search that a folder holds; None if it holds none.

    Raises:
        BadRequestError: it cannot be read, is more than data, or began with other prompts or chose by other tasks.
    """
    if not (run_dir / _STATE).exists():
        return None
    try:
        with (run_dir / _STATE).open("rb") as file:
            _DataOnly(file).load()  # before the package itself reads it, which would call what it names
        load = cast(Any, GEPAState.load)  # pyright: ignore[reportUnknownMemberType] -- its type parameters are not known
        state = load(str(run_dir))
    except Exception as error:  # whatever a damaged pickle raises
        raise BadRequestError(
            f"{run_dir / _STATE} cannot be read ({error}): delete it, or give another run_dir"
        ) from error
    if state.program_candidates[0] != {name: template.template for name, template in seeds.items()}:
        raise BadRequestError(
            f"run_dir={str(run_dir)!r} holds the search of other prompts than initial_resources has now. Give them "
            "again, or give another run_dir"
        )
    if state.adapter_state.get(TASKS, (now := digest_of_tasks(val))) != now:
        raise BadRequestError(
            f"run_dir={str(run_dir)!r} holds a search that chose by other validation tasks than val_dataset has now, "
            "or in another order: its scores say nothing of these. Give them again, or give another run_dir"
        )
    return SavedSearch(
        state.program_candidates,
        state.parent_program_for_candidate,
        state.prog_candidate_val_subscores[0],
        state.adapter_state.get(REWARDS, {}),
    )
