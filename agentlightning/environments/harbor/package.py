"""The parts of the package Harbor that HarborAgent uses; they take seconds to load."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any

_QUIET = {"HARBOR_TELEMETRY": "off", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
"""Variables that keep Harbor from requests of its own."""


def require_harbor() -> None:
    """Raise an error if Harbor is not installed; loads nothing.

    Raises:
        ImportError: Harbor is not installed, or this Python is too old for it.
    """
    if importlib.util.find_spec("harbor") is not None:
        return
    why = "" if sys.version_info >= (3, 12) else f", and Python 3.12 or newer (this is {sys.version.split()[0]})"
    raise ImportError(
        f"HarborAgent requires Harbor{why}: pip install 'agl-framework[harbor]'. Only runners need it: in an "
        "environment that runs only the algorithm, set AGL_CURRENT_ROLE=algorithm"
    )


class Harbor:
    """The classes and functions of Harbor that HarborAgent uses."""

    def __init__(self) -> None:
        require_harbor()
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        self.trial: Any = importlib.import_module("harbor.trial.trial").Trial
        self.trial_config: Any = importlib.import_module("harbor.models.trial.config").TrialConfig
        self._task_config: Any = importlib.import_module("harbor.models.trial.config").TaskConfig
        self._client: Any = importlib.import_module("harbor.tasks.client").TaskClient
        self._task: Any = importlib.import_module("harbor.models.task.task").Task
        self._modes: Any = importlib.import_module("harbor.models.task.verifier_mode")
        self.separate: Any = self._modes.VerifierEnvironmentMode.SEPARATE
        self.environments: Any = importlib.import_module("harbor.environments.factory").EnvironmentFactory
        self.dockerfile_workdir: Any = importlib.import_module(
            "harbor.environments.definition"
        ).parse_dockerfile_workdir

    async def load_task(self, fields: Mapping[str, Any]) -> Any:
        """Return a task, downloaded if it is not on this machine."""
        found = self._task_config.model_validate(dict(fields)).get_task_id()
        downloaded = await self._client().download_tasks(task_ids=[found])
        return self._task(task_dir=downloaded.results[0].path)

    def any_shared(self, task: Any) -> bool:
        """Return whether the task itself asks, for one of its steps, for a verifier in the sandbox of the agent."""
        return bool(self._modes.task_has_any_shared_verifier(task.config))


@functools.cache
def load_harbor() -> Harbor:
    """Load Harbor without telemetry and without requests for prices.

    Raises:
        ImportError: Harbor is not installed.
    """
    return Harbor()
