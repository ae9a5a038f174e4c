"""What a program finds when it starts: its environment, empty but for an allow-list, and its files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from agentlightning.env_var import PROGRAM_VARIABLES
from agentlightning.litagent.command.attempt_folder import AttemptFolder
from agentlightning.types import LLM, AttemptedRollout, NamedResources, ProxyLLM, Resource

PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables of the runner that every program gets."""
RESERVED = frozenset(PROGRAM_VARIABLES)
"""Variables that are set for each attempt, and that nobody else sets."""
REWARD_FILE = "reward.json"
SHORTEST_KEY = 8
NO_KEY = "none"
"""For a model without a key: clients refuse to start without one, and such servers ignore it."""


def attempt_resources(resources: NamedResources, rollout: AttemptedRollout) -> dict[str, Resource]:
    """Return the resources as this attempt sees them: models behind the gateway with its address and key."""
    return {
        name: value.with_attempted_rollout(rollout) if isinstance(value, ProxyLLM) else value
        for name, value in resources.items()
    }


def model_of(resources: Mapping[str, Resource], name: str | None) -> LLM | None:
    """Return the model that the usual variables name: the one called `name`, else the first; None if there is none.

    Raises:
        ValueError: `name` is given and is no model.
    """
    if name is None:
        return next((value for value in resources.values() if isinstance(value, LLM)), None)
    found = resources.get(name)
    if isinstance(found, LLM):
        return found
    published = ", ".join(f"{key} ({value.resource_type})" for key, value in resources.items()) or "nothing"
    raise ValueError(f"llm={name!r} names no LLM resource; published: {published}")


def keys_of(resources: Mapping[str, Resource]) -> list[str]:
    """Return the keys that a program is given; none of them is to be read in what it prints. A placeholder is none."""
    keys = [value.api_key or "" for value in resources.values() if isinstance(value, LLM)]
    return [key for key in keys if len(key) >= SHORTEST_KEY]


def write_files(folder: AttemptFolder, task: object, resources: Mapping[str, Resource]) -> bytes:
    """Write the task and the resources into the attempt's own folder, and return the task as JSON."""
    data = json.dumps(task, ensure_ascii=False).encode() + b"\n"
    folder.write("task.json", data)
    described = {name: value.model_dump(mode="json") for name, value in resources.items()}
    folder.write("resources.json", json.dumps(described, ensure_ascii=False).encode())
    return data


def environment(
    folder: Path, rollout: AttemptedRollout, model: LLM | None, passed: Iterable[str], own: Mapping[str, str]
) -> dict[str, str]:
    """Return the whole environment of a program: the passed variables, the user's own, and those of the attempt."""
    kept = {name: os.environ[name] for name in (*PASSED, *passed) if name in os.environ}
    attempt = {
        "AGL_ROLLOUT_ID": rollout.rollout_id,
        "AGL_ATTEMPT_ID": rollout.attempt.attempt_id,
        "AGL_MODE": rollout.mode or "",
        "AGL_TASK_FILE": str(folder / "task.json"),
        "AGL_RESOURCES_FILE": str(folder / "resources.json"),
        "AGL_REWARD_FILE": str(folder / REWARD_FILE),
        "TMPDIR": str(folder),
    }
    if model is None:
        return {**kept, **own, **attempt}
    base, key = model.get_base_url(), model.api_key or NO_KEY
    return {
        **kept,
        **own,
        **attempt,
        "OPENAI_BASE_URL": base,
        "OPENAI_API_BASE": base,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model.model,
        "ANTHROPIC_BASE_URL": base.removesuffix("/").removesuffix("/v1"),  # its clients add /v1/messages
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": model.model,
        "AGL_MODEL": model.model,
    }
