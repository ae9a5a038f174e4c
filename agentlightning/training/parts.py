"""What the parts of a run's loop share: settings, store, policy and engine, and whom they tell of what they see."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from agentlightning.adapter import TraceToTripletBase
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.base import LightningStore
from agentlightning.training.alarms import Alarm, Alarms
from agentlightning.training.checkpoint.resume import Resumption
from agentlightning.training.chosen.choosing import Pick
from agentlightning.training.group_rewards import GroupReward
from agentlightning.training.policies.learners import Learners
from agentlightning.training.progress import Progress, Silent
from agentlightning.training.recording import RunRecorder
from agentlightning.training.resources import resources_to_publish
from agentlightning.training.run_checks import DriftGuard
from agentlightning.training.run_inputs import decoder_of, triplet_adapter
from agentlightning.training.settings import GRPOSettings, RecordTokens
from agentlightning.training.tasks import with_timeout
from agentlightning.types import NamedResources, ResourceUnion, RolloutConfig

if TYPE_CHECKING:
    from agentlightning.training.run_inputs import RunSource

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RunParts:
    """One run's parts. Each is driven by the loop."""

    settings: GRPOSettings
    store: LightningStore
    learners: Learners
    proxy: LLMProxy
    adapter: TraceToTripletBase
    progress: Progress
    resume: Resumption
    recorder: RunRecorder
    guard: DriftGuard = field(default_factory=DriftGuard)
    rollout_config: RolloutConfig | None = None
    """What the Trainer says of attempts, time limits and retries."""
    beside: NamedResources = field(default_factory=dict[str, ResourceUnion])
    """Resources of agents beside the policy: the Trainer's `initial_resources`."""
    group_reward: GroupReward | None = None
    """Gives the rollouts of a task their rewards together; None leaves each its own."""
    pick: Pick | None = None
    """Says of a rollout whether it may be chosen, in supervised fine-tuning; None: every one may."""
    alarms: Alarms = field(default_factory=Alarms)
    """Watches the figures of the steps."""
    step: int = 0
    """The step that is being taken."""

    @classmethod
    def of(
        cls,
        algorithm: RunSource,
        settings: GRPOSettings,
        learners: Learners,
        proxy: LLMProxy,
        resume: Resumption,
        progress: Progress,
        *,
        held_out: Sequence[object],
        tokens: RecordTokens = "none",
    ) -> Self:
        """Return the parts of a run whose learner is another system's trainer.

        Args:
            held_out: its held-out tasks.
            tokens: of which trained tokens the store keeps figures.
        """
        return cls(
            settings=settings,
            store=algorithm.get_store(),
            learners=learners,
            proxy=proxy,
            adapter=triplet_adapter(algorithm),
            progress=progress,
            resume=resume,
            recorder=RunRecorder(algorithm.get_run_log(), learners, tokens, has_held_out=bool(held_out)),
            guard=DriftGuard(settings.max_drift, decoder_of(learners)),
            rollout_config=algorithm.get_rollout_config(),
            beside=algorithm.get_initial_resources() or {},
            alarms=Alarms(settings.alarms),
        )

    def note(self, text: str, level: int = logging.INFO) -> None:
        """Tell whoever watches the run: its display, and the log where the program has one."""
        if logger.hasHandlers() or type(self.progress) is Silent:  # else Python repeats warnings on standard error
            logger.log(level, text)
        self.progress.note(text)

    def alarm(self, text: str, name: str) -> None:
        """Tell it as a warning, and record it with the present step."""
        self.note(text, logging.WARNING)
        self.recorder.alarm(self.step, name, text)

    def tell(self, alarm: Alarm) -> None:
        """Tell and record that a condition of the run began, or that it is over."""
        self.note(alarm.line, logging.WARNING if alarm.state == "raised" else logging.INFO)
        self.recorder.alarm(alarm.step, alarm.name, alarm.text, **alarm.data())

    def limits(self) -> RolloutConfig:
        """Return how long a rollout may take, and its retries."""
        seconds = self.settings.rollout_timeout_seconds or self.settings.step_timeout_seconds
        return with_timeout(self.rollout_config, seconds)

    async def publish(self, purpose: str, temperature: float) -> str:
        """Publish the policy for one purpose and return the id of the resources."""
        parameters: dict[str, object] = {"temperature": temperature, "max_tokens": self.settings.max_completion_length}
        models = [engine.model_name for engine in self.learners.engines]
        name = self.settings.resource_name if self.learners.names is None else None
        resources = resources_to_publish(self.proxy, name, models, parameters, self.beside)
        update = await self.store.add_resources(resources)
        logger.debug("resources %s serve the policy for %s", update.resources_id, purpose)
        return update.resources_id
