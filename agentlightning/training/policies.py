"""Our own learner: loads, updates and saves the policies of a run. Most runs have one policy; a run has several if the
agents of one rollout each learn from their own calls."""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from agentlightning.engine.engine import ONLY_POLICY, InferenceEngine
from agentlightning.engine.policy_engine import PolicyEngine
from agentlightning.engine.served import load_model
from agentlightning.engine.vllm import VLLMEngine
from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore
from agentlightning.training.checkpoint import Checkpoint
from agentlightning.training.learner.figures import UpdateResult
from agentlightning.training.learner.policy import Policy
from agentlightning.training.learner.update import UpdateSettings
from agentlightning.training.policy_files import digest_of, fingerprint_of, load_policy, save_policy
from agentlightning.training.rows import StepRows
from agentlightning.training.settings import TrainingSettings
from agentlightning.training.tasks import place_of
from agentlightning.training.updater import Learner, StepUpdate, Updater

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentlightning.adapter.rows.samples import Sample
    from agentlightning.training.learner.figures import RowFigures

POLICIES: Final = "policies"
"""Folder in a checkpoint with one folder per policy, if there are several."""
_COUNTS: Final = ("steps", "skipped_steps", "rows", "rollouts", "tokens")
_LARGEST: Final = ("first_ratio_error",)


class PolicyUpdater(Updater):
    """The policies of a run, which learn in this process."""

    def __init__(self, policies: Mapping[str | None, Policy], settings: TrainingSettings) -> None:
        own = settings.by_policy()
        super().__init__([Learner(name, own[name], policy) for name, policy in policies.items()])
        self.policies = dict(policies)

    @classmethod
    async def open(
        cls,
        settings: TrainingSettings,
        store: LightningStore,
        folder: Path,
        checkpoint: Checkpoint | None,
        stack: AsyncExitStack,
    ) -> PolicyUpdater:
        """Load the policies and start their engines; `stack` stops them. See `load_policies` and `check_context`."""
        updater = cls(await asyncio.to_thread(load_policies, settings, checkpoint), settings)
        for each in updater.learners:
            check_context(each)
        steps = 0 if checkpoint is None else checkpoint.step
        updater.engines = tuple(engine_for(each, store, folder, begun=steps) for each in updater.learners)
        for engine in updater.engines:
            stack.callback(engine.stop)
            await asyncio.to_thread(engine.start)
        return updater

    @override
    def update_weights(self, step: int, rows: StepRows) -> StepUpdate:
        shares = {
            each.name: rows.share(each.settings.loss_settings.aggregates_by, each.takes) for each in self.learners
        }
        return self.learn(step, rows.samples, rows.advantages, shares)

    def learn(
        self,
        step: int,
        samples: Sequence[Sample],
        advantages: Sequence[float | Sequence[float]],
        shares: Mapping[str | None, float],
    ) -> StepUpdate:
        """Train each policy on its own rows; a policy without rows does not change.

        Shapes: samples: (B,), advantages: (B,). `shares`: see `StepRows.share`, per policy.
        """
        version, results = self.weight_version, dict[str | None, UpdateResult]()
        rows: dict[int, RowFigures] = {}
        alarms: list[tuple[str, str]] = []
        for learner in self.learners:
            own = _rows_of(learner, samples)
            if not own:
                continue
            settings, policy, share = learner.settings, self.policies[learner.name], shares[learner.name]
            result = results[learner.name] = policy.update(
                [samples[row] for row in own],
                [advantages[row] for row in own],
                UpdateSettings(
                    loss=settings.loss_settings,
                    critic=settings.critic,
                    constant_length=settings.loss_settings.constant_length(settings.max_completion_length),
                    share=share,
                    num_iterations=settings.num_iterations,
                    minibatch_rollouts=settings.minibatch_rollouts,
                    temperature=settings.temperature,
                    max_grad_norm=settings.max_grad_norm,
                    learning_rate=settings.learning_rate_at(step),
                    weight_version=policy.weight_version if settings.most_stale else None,
                ),
            )
            rows |= dict(zip(own, result.rows, strict=True))
            result.figures["share"] = share
            prefix = "" if learner.name is None else f"policy {learner.name}: "
            alarms += [("update", f"step {step}: {prefix}{note}") for note in result.notes]
        changed = frozenset(name for name, result in results.items() if result.figures["steps"])
        if changed:
            self.advance(version + 1)
        return StepUpdate(_combined(results), [rows[row] for row in range(len(samples))], changed, alarms=alarms)

    @override
    def digest(self) -> str:
        if self.names is None:
            return digest_of(self.policies[None])
        lines = "".join(f"{name} {digest_of(policy)}\n" for name, policy in self.policies.items())
        return hashlib.sha256(lines.encode()).hexdigest()

    @override
    def checkpoint_facts(self) -> dict[str, Any]:
        if self.names is None:
            return {}
        return {"digests": {str(name): digest_of(policy) for name, policy in self.policies.items()}}

    @override
    def save_checkpoint(self, folder: Path, step: int) -> None:
        for name, policy in self.policies.items():
            place = folder_of(folder, name)
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            save_policy(policy, place)

    @override
    def save_model(self, folder: Path) -> None:
        for name, policy in self.policies.items():
            policy.save(folder if name is None else folder / name)

    @override
    def divergences(self, samples: Sequence[Sample]) -> list[float]:
        values: dict[int, float] = {}
        for learner in self.learners:
            if own := _rows_of(learner, samples):
                settings, policy = learner.settings, self.policies[learner.name]
                update = UpdateSettings(loss=settings.loss_settings, temperature=settings.temperature)
                divergences = policy.divergences([samples[row] for row in own], update)
                values |= dict(zip(own, divergences, strict=True))
        return [values.get(row, 0.0) for row in range(len(samples))]


def _rows_of(learner: Learner, samples: Sequence[Sample]) -> list[int]:
    return [row for row, sample in enumerate(samples) if learner.takes(sample)]


def _combined(results: Mapping[str | None, UpdateResult]) -> dict[str, float]:
    """Return the combined figures of all policies: sums of counts, the largest error, and means of all others, weighted
    by trained tokens."""
    if None in results:
        return results[None].figures
    each = {str(name): result.figures for name, result in results.items()}
    combined: dict[str, float] = {}
    for key in next(iter(each.values())):
        if any(key not in figures for figures in each.values()):  # not every policy had stale tokens
            continue
        values = {name: figures[key] for name, figures in each.items()}
        if key in _COUNTS:
            combined[key] = sum(values.values())
        elif key in _LARGEST:
            combined[key] = max(values.values())
        else:
            tokens = {name: figures["tokens"] for name, figures in each.items() if figures["steps"]}
            total = sum(tokens.values())
            combined[key] = sum(values[name] * tokens[name] / total for name in tokens) if total else float("nan")
    return combined | {f"{name}/{key}": value for name, figures in each.items() for key, value in figures.items()}


def check_context(learner: Learner) -> None:
    """Raise BadRequestError if a reply could fill the context of the model."""
    most, context = learner.settings.max_completion_length, learner.policy.context_length
    if most >= context:
        raise BadRequestError(
            f"max_completion_length={most} leaves no room for a prompt: the context of the model is {context} tokens"
        )


def load_policies(settings: TrainingSettings, checkpoint: Checkpoint | None) -> dict[str | None, Policy]:
    """Return the policies of a run by name, from a checkpoint; without a checkpoint, the initial policies.

    Policies with adapters on the same model share its frozen weights, which are loaded once.
    """
    facts: Mapping[str, Any] = {} if checkpoint is None else checkpoint.facts
    shared: dict[tuple[str, bool, str | None], PreTrainedModel] = {}
    policies: dict[str | None, Policy] = {}
    for name, own in settings.by_policy().items():
        base: PreTrainedModel | None = None
        if name is not None and own.lora is not None:
            key = own.model, own.bf16, own.four_bit
            if key not in shared:
                shared[key] = load_model(own.model, bf16=own.bf16, device=own.device, four_bit=own.four_bit)
            base = twin_of(shared[key])
        digest = facts.get("digests", {}).get(name, "") if name is not None else facts.get("digest", "")
        policies[name] = load_policy(
            own,
            None if checkpoint is None else folder_of(checkpoint.path, name),
            weight_version=facts.get("weight_version", 0),
            digest=digest,
            base=base,
        )
    return policies


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with its own layers that shares the weights of `model` in memory."""
    numbers = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in numbers})


def folder_of(checkpoint: Path, name: str | None) -> Path:
    return checkpoint if name is None else checkpoint / POLICIES / name


def fingerprint_of_models(settings: TrainingSettings) -> str:
    """Return the digest of the files of all initial models of the run; see `fingerprint_of`."""
    models = list(dict.fromkeys(own.model for own in settings.by_policy().values()))
    digests = [fingerprint_of(model) for model in models]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def engine_for(learner: Learner, store: LightningStore, folder: Path, *, begun: int) -> PolicyEngine:
    """Return the engine that serves a policy. `begun`: number of steps of earlier starts of the run."""
    settings, policy = learner.settings, learner.policy
    seed = settings.seed if settings.deterministic else settings.seed + begun
    if settings.use_vllm:
        return VLLMEngine(
            policy,
            settings,
            model=settings.model,
            folder=folder,
            has_adapters=settings.lora is not None,
            seed=seed,
            max_batch=settings.engine_batch,
            logprobs_mode="raw_logprobs" if settings.reshaping else "processed_logprobs",
        )

    async def place(rollout_id: str) -> str | None:
        rollout = await store.get_rollout_by_id(rollout_id)
        return None if rollout is None else place_of(rollout)

    return InferenceEngine(
        policy,
        max_batch=settings.engine_batch,
        seed=seed,
        place_of=place if settings.deterministic else None,
        model_name=learner.name or ONLY_POLICY,
    )
