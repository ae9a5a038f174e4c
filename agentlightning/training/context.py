"""`TrainingContext`: the state and the reports shared by the parts of a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from agentlightning.adapter import TraceToTripletBase
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.base import LightningStore
from agentlightning.training.alarms import Alarm, Alarms
from agentlightning.training.group_rewards import GroupReward
from agentlightning.training.progress import Progress
from agentlightning.training.recording import RunRecorder
from agentlightning.training.resume import Resumption
from agentlightning.training.run_checks import RunGuard
from agentlightning.training.serving import resources_to_publish
from agentlightning.training.settings import Pick, TrainingSettings
from agentlightning.training.tasks import with_timeout
from agentlightning.training.updater import Updater
from agentlightning.types import NamedResources, ResourceUnion, RolloutConfig

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainingContext:
    """The parts of one run. Belongs to the loop of the run."""

    settings: TrainingSettings
    store: LightningStore
    updater: Updater
    proxy: LLMProxy
    adapter: TraceToTripletBase
    progress: Progress
    resume: Resumption
    recorder: RunRecorder
    guard: RunGuard
    alarms: Alarms
    rollout_config: RolloutConfig | None = None
    """The Trainer's settings of attempts, time limits and retries."""
    resources: NamedResources = field(default_factory=dict[str, ResourceUnion])
    """Resources that agents receive in addition to the policy: the Trainer's `initial_resources`."""
    group_reward: GroupReward | None = None
    """Function that computes the rewards of all rollouts of a task together; None keeps the rewards of the rollouts."""
    pick: Pick | None = None
    """Function that returns whether supervised fine-tuning may train on a rollout; None allows all."""
    step: int = 0
    """The current step."""

    def note(self, text: str, level: int = logging.INFO) -> None:
        """Report to the run's display, and to the log if the program configured logging."""
        if logger.hasHandlers() or type(self.progress) is Progress:  # else Python repeats warnings on standard error
            logger.log(level, text)
        self.progress.note(text)

    def alarm(self, text: str, name: str) -> None:
        """Report a warning, and record it with the current step."""
        self.note(text, logging.WARNING)
        self.recorder.alarm(self.step, name, text)

    def report(self, alarm: Alarm) -> None:
        """Report and record that a condition of the run began or ended."""
        self.note(alarm.line, logging.WARNING if alarm.state == "raised" else logging.INFO)
        self.recorder.alarm(alarm.step, alarm.name, alarm.text, **alarm.data())

    def limits(self) -> RolloutConfig:
        """Return the time limit and the number of retries of a rollout."""
        seconds = self.settings.rollout_timeout_seconds or self.settings.step_timeout_seconds
        return with_timeout(self.rollout_config, seconds)

    async def publish(self, purpose: str, temperature: float) -> str:
        """Publish the policy for one purpose and return the id of the resources."""
        limits = {"temperature": temperature, "max_tokens": self.settings.max_completion_length}
        parameters: dict[str, object] = {**limits, **self.settings.reshaping}
        models = [engine.model_name for engine in self.updater.engines]
        name = self.settings.resource_name if self.updater.names is None else None
        resources = resources_to_publish(self.proxy, name, models, parameters, self.resources)
        update = await self.store.add_resources(resources)
        logger.debug("published resources %s with the policy for %s", update.resources_id, purpose)
        return update.resources_id
