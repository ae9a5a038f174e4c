"""A run that the Tinker service trains: it learns and samples; the gateway reaches it through a server in front."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from agentlightning.engine.chat_server import ChatServer
from agentlightning.errors import EngineError
from agentlightning.training.external.remote import RemoteEngine, RemotePolicy, RemoteUpdater
from agentlightning.training.external.tinker.service import PLACE, TinkerService
from agentlightning.training.result import GRPOResult
from agentlightning.training.resume import OpenRun
from agentlightning.training.rows import StepRows
from agentlightning.training.run import train
from agentlightning.training.run_inputs import RunSource, check_tasks, triplet_adapter
from agentlightning.training.settings import GRPOSettings
from agentlightning.training.tasks import items_of
from agentlightning.training.updater import StepUpdate
from agentlightning.types import Dataset

_MAX_TOKENS: Final = 32_768
"""Of a row, where the model's settings allow more."""


async def run_tinker(
    source: RunSource,
    settings: GRPOSettings,
    train_dataset: Dataset[Any] | None,
    val_dataset: Dataset[Any] | None,
    *,
    api_key: str,
    base_url: str | None,
    tokenizer: str,
    rank: int,
    connect_seconds: float,
) -> GRPOResult:
    """Train with the Tinker service; see `Tinker`."""
    tasks, held_out = items_of(train_dataset), items_of(val_dataset)
    check_tasks("Tinker", settings, tasks, held_out)
    triplet_adapter(source)  # before anything is loaded
    policy = await asyncio.to_thread(RemotePolicy, tokenizer, _MAX_TOKENS, "tokenizer")

    async def make_updater(opened: OpenRun, stack: AsyncExitStack) -> TinkerUpdater:
        checkpoint, state = opened.resume.checkpoint, None
        if checkpoint is not None:
            policy.weight_version = checkpoint.facts["weight_version"]
            state = json.loads((checkpoint.path / PLACE).read_text())["state"]
        service = TinkerService(settings.model, base_url, api_key)
        stack.callback(service.close)
        await asyncio.to_thread(service.open, rank, settings.seed, state, policy.weight_version, connect_seconds)
        served = policy.served_as(settings, "agl.Tinker")
        server = ChatServer(service, policy.tokenizer, served, token=service.token)
        await server.start("127.0.0.1")
        stack.callback(server.stop)
        return TinkerUpdater(policy, settings, service, server.base_url)

    config, facts = {"tinker": {**settings.as_json(), "rank": rank}}, {"tinker": {"rank": rank}}
    return await train(source, settings, tasks, held_out, make_updater, config=config, facts=facts)


class TinkerUpdater(RemoteUpdater):
    """Hands the rows of each step to the service."""

    def __init__(self, policy: RemotePolicy, settings: GRPOSettings, service: TinkerService, base_url: str) -> None:
        super().__init__(policy, settings, RemoteEngine(base_url, service.token), name=service.name)
        self._service = service

    @override
    def update_weights(self, step: int, rows: StepRows) -> StepUpdate:
        settings, version = self.learners[0].settings, self.weight_version + 1
        figures = self._service.learn(
            rows.samples,
            rows.advantages,
            share=rows.share("token"),
            learning_rate=settings.learning_rate_at(step),
            clip=settings.max_grad_norm,
        )
        self._service.publish(version)
        self.advance(version)
        return StepUpdate(figures, changed=frozenset((None,)))

    @override
    def save_model(self, folder: Path) -> None:
        self._service.save_model(folder)

    @override
    def save_checkpoint(self, folder: Path, step: int) -> None:
        try:
            self._service.save(folder, step)
        except EngineError as error:
            raise OSError(str(error)) from error  # a checkpoint that cannot be written: the run warns and goes on
