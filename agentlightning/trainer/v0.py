"""The methods of the v0.1 `Trainer`: an agent works for a server that speaks the v0.1 protocol."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agentlightning.litagent.decorator import as_agent
from agentlightning.litagent.litagent import LitAgent
from agentlightning.trainer.parts import TrainerParts

if TYPE_CHECKING:
    from agentlightning.legacy import AgentLightningClient


class TrainerLegacy(TrainerParts):
    """What is left of the v0.1 trainer."""

    n_runners: int
    max_rollouts: int | None
    algorithm: Any
    adapter: Any

    def fit_v0(
        self, agent: LitAgent[Any] | Callable[..., object], train_data: str | AgentLightningClient, **others: object
    ) -> None:
        """Deprecated: run an agent on the tasks of a v0.1 server, until each of `n_runners` has done `max_rollouts`.

        `train_data` is the server's URL, or a client. With one runner it works in this process.

        Raises:
            TypeError, ValueError: `train_data` is no such server; there is an algorithm; a setting has no effect here.
            RunnerDiedError: a worker process ended in an unexpected way.
        """
        from agentlightning.legacy import DevTaskLoader
        from agentlightning.legacy.workers import serve, serve_in_processes

        warnings.warn("fit_v0 speaks the deprecated v0.1 protocol; use fit()", DeprecationWarning, stacklevel=2)
        if others:
            raise TypeError(
                f"fit_v0: {', '.join(others)} would have no effect: the server has the tasks. To try an agent on a "
                "dataset, call dev(agent, train_dataset=...)"
            )
        if self.algorithm is not None:
            raise ValueError("fit_v0 serves a v0.1 server, which learns; an algorithm here needs fit(agent, ...)")
        client = self._client_of(train_data)
        if isinstance(client, DevTaskLoader) and self.n_runners > 1:
            raise ValueError(
                "A DevTaskLoader keeps the results in its own process: n_runners must be 1, "
                f"got {self.n_runners}; or call dev(agent, tasks)"
            )
        parts: tuple[Any, ...] = (as_agent(agent), client, self.tracer, self.adapter, self.max_rollouts)
        parts[0].set_trainer(self)
        if self.n_runners == 1:
            serve(*parts)
        else:
            serve_in_processes(self.n_runners, *parts)

    @staticmethod
    def kill_orphaned_processes() -> int:
        """End the worker processes that `fit_v0` of this process has left behind; returns how many there were."""
        from agentlightning.legacy.workers import kill_recorded

        return kill_recorded()

    def _client_of(self, train_data: object) -> AgentLightningClient:
        from agentlightning.legacy import AgentLightningClient

        if isinstance(train_data, AgentLightningClient):
            return train_data
        if not isinstance(train_data, str):
            raise TypeError(
                "train_data of fit_v0 is the URL of a v0.1 server, or a client of it; for a dataset call "
                f"fit(agent, train_dataset=...). Got {type(train_data).__name__}"
            )
        if not train_data.startswith(("http://", "https://")):
            raise ValueError(
                f"train_data of fit_v0 must be an http address such as http://host:8000; got {train_data!r}"
            )
        return AgentLightningClient(train_data)
