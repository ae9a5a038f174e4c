"""The store that a command asks: named by `--store`, opened, asked, closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.types import AttemptedRollout, Rollout

T = TypeVar("T")

STORE = typer.Option(
    "agl.db",
    "--store",
    envvar="AGENT_LIGHTNING_STORE_URL",
    help="A file, the folder of a run, or where the store is: http://...:4747.",
)
_PATIENCE_SECONDS = 5.0
"""For so long a server that does not answer is asked again."""


def with_store(place: str, ask: Callable[[LightningStore], Awaitable[T]]) -> T:
    """Open the store that an option names, return what `ask` gives, and close it."""
    from agentlightning.store.spec import store_from_spec

    async def run() -> T:
        spec = spec_of_place(place)
        patience = {"deadline": _PATIENCE_SECONDS} if spec.startswith("http") and "deadline=" not in spec else {}
        opened = store_from_spec(spec, **patience)
        try:
            return await ask(opened)
        finally:
            await opened.close()

    return asyncio.run(run())


def spec_of_place(place: str) -> str:
    """Return the spec of the store that an option names.

    Raises:
        BadRequestError: it names a file that is not there, or a store that dies with its process.
    """
    from agentlightning.errors import BadRequestError
    from agentlightning.store.spec import spec_of

    spec = spec_of(str(Path(place) / "store.db") if Path(place).is_dir() else place)
    body = spec.partition("?")[0]
    if body == "memory":
        raise BadRequestError("A store in memory can be asked by its own process only; name a file or a server")
    if body.startswith("sqlite:///") and not Path(body.removeprefix("sqlite:///")).is_file():
        raise BadRequestError(f"There is no store file {body.removeprefix('sqlite:///')!r}; name one with --store")
    return spec


async def existing_rollout(store: LightningStore, rollout_id: str, place: str) -> AttemptedRollout | Rollout:
    """Return a rollout.

    Raises:
        NotFoundError: there is none of that id; says how to find one.
    """
    from agentlightning.errors import NotFoundError
    from agentlightning.store.spec import public_form

    rollout = await store.get_rollout_by_id(rollout_id)
    if rollout is None:
        hint = f"agl rollouts list --store {public_form(place)} shows those that there are"
        raise NotFoundError(f"There is no rollout {rollout_id!r} in {public_form(place)}; {hint}")
    return rollout
