"""The endpoints at which VERL's model answers: each agent loop worker begins to serve with its first task."""

from __future__ import annotations

from typing import Any

from agentlightning.llm_proxy import LLMProxy
from agentlightning.training.external.remote import RemoteEngine
from agentlightning.training.external.verl.session import VERLSession
from agentlightning.training.serving import entry_of
from agentlightning.training.settings import GRPOSettings


class Endpoints:
    """Keeps the gateway's list of models up to date. Belongs to the loop."""

    def __init__(self, proxy: LLMProxy, session: VERLSession, settings: GRPOSettings) -> None:
        """Take a gateway that serves the first of them already."""
        self._proxy, self._session, self._settings = proxy, session, settings
        self._known = 1

    async def refresh(self) -> None:
        """Let the gateway spread calls over those that have come up since."""
        addresses = await self._session.known_addresses()
        if len(addresses) == self._known:
            return
        self._known = len(addresses)
        others: list[Any] = [each for each in self._proxy.model_list if each["model_name"] != RemoteEngine.model_name]
        engines = [RemoteEngine(address, self._session.token) for address in addresses]
        self._proxy.update_model_list([*others, *(entry_of(engine, self._settings) for engine in engines)])
