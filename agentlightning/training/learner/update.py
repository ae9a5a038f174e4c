"""One update of the weights: passes over the rows, mini-batches, optimizer steps.

An update is a function of the trained weights, the optimizer's state, the random state and the rows. The order of the
rows does not matter: rollouts are sorted by content before anything is drawn or summed. On a CPU, with the same number
of threads, equal inputs give equal results, bit for bit, in every process.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.engine.torch_setup import is_out_of_memory, short_cause
from agentlightning.errors import OutOfMemoryError
from agentlightning.training.batch import Batch, make_batch
from agentlightning.training.learner.figures import RowFigures, UpdateResult, measured_rows, row_figures, summary
from agentlightning.training.learner.forward import Scores, can_pack, score
from agentlightning.training.learner.micro_batches import MicroBatches
from agentlightning.training.learner.optimizers import make_optimizers, rehearse
from agentlightning.training.learner.parameters import Checkpointing, MasterWeights, Offloading, Reference, ValueHead
from agentlightning.training.loss_settings import CriticSettings, LossSettings
from agentlightning.training.losses.critic import explained, value_loss, with_credit
from agentlightning.training.losses.importance import stale_figures
from agentlightning.training.losses.kl import kl_divergence
from agentlightning.training.losses.objective import BatchInputs, highest_entropy, is_finite, policy_loss
from agentlightning.training.losses.weights import token_weights
from agentlightning.training.optimizer_settings import DEFAULT_OPTIM, OptimizerSettings

if TYPE_CHECKING:
    from agentlightning.adapter.rows.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """The settings of one update; those without a docstring are explained in `TrainingSettings`."""

    learning_rate: float | None = None
    """Learning rate for this and later updates; None keeps the previous one."""
    num_iterations: int = 1
    minibatch_rollouts: int | None = None
    loss: LossSettings = field(default_factory=LossSettings)
    critic: CriticSettings | None = None
    constant_length: int | None = None
    share: float = 1.0
    temperature: float = 1.0
    """Temperature at which the rows were sampled."""
    max_grad_norm: float = 1.0
    weight_version: int | None = None
    """Version of the weights before the update; tokens of other versions are stale. With None, no token is stale."""


class Optimizer:
    """The optimizer of one model and the other parts of a step. Used by one thread, while nothing is generated."""

    def __init__(
        self,
        model: PreTrainedModel,
        pad_id: int,
        *,
        seed: int,
        learning_rate: float = 1e-5,
        optimizer: OptimizerSettings | None = None,
        max_tokens_per_forward: int = 4096,
        padding_free: bool = True,
        gradient_checkpointing: bool = False,
        activation_offloading: bool = False,
        keeps_reference: bool = False,
        moves_reference: bool = False,
        value_learning_rate: float | None = None,
    ) -> None:
        """Make the optimizer of a model.

        Args:
            seed: seed of the order of the mini-batches.
            learning_rate: learning rate, for updates without their own.
            optimizer: settings of the optimizer; None is `OptimizerSettings()`.
            max_tokens_per_forward: maximum number of tokens in one forward pass; a longer row has its own pass. Limits
                the memory, and changes the result only by rounding.
            padding_free: join the rows of a forward pass into one sequence instead of padding them; see `forward.py`.
            gradient_checkpointing: keep less for the backward pass and recompute it.
            activation_offloading: keep it in the machine's memory.
            keeps_reference: for a loss with a penalty towards the model as loaded; see `Reference`.
            moves_reference: for one with `sync_ref_model`, whose reference follows the policy.
            value_learning_rate: learning rate of a value head, for updates with a critic; None creates no value head.
        """
        self._model = model
        self._pad_id = pad_id
        self.reference = Reference(model, moves=moves_reference) if keeps_reference else None
        """The reference of the KL penalty, if there is one."""
        self.random = random.Random(seed)
        """Random generator for the order of the mini-batches."""
        self.micro_batches = MicroBatches(model.device, max_tokens_per_forward, self._forget_gradients)
        """Splits batches into micro-batches."""
        self._tries_packing, self._packed = padding_free, False
        self._checkpointing = Checkpointing(model) if gradient_checkpointing else nullcontext
        self._offloading = partial(Offloading, model) if activation_offloading else nullcontext
        self.weights = MasterWeights(model)
        self._head = None if value_learning_rate is None else ValueHead(model)
        self.learned = {**self.weights.masters, **({} if self._head is None else self._head.learned())}
        """The trained weights by name: of the policy, and of the value head if there is one."""
        self._first_rate = learning_rate
        self.settings = optimizer or OptimizerSettings()
        """The settings of the optimizers."""
        self.optimizers = make_optimizers(self.settings, model, self.learned, learning_rate, value_learning_rate)
        """torch's optimizers, each for its own weights."""
        # a started step must not fail half-way for lack of memory: the fused AdamW needs none besides its state
        self._is_default = self.settings.optim == DEFAULT_OPTIM and not self.settings.optim_args
        self._is_rehearsed = self._is_default
        self.steps_taken = 0
        """Number of optimizer steps since the start, including those of an update that ended in an error."""

    def update(
        self,
        samples: Sequence[Sample],
        advantages: Sequence[float | Sequence[float]],
        settings: UpdateSettings,
    ) -> UpdateResult:
        """Take the optimizer steps; see `Policy.update`."""
        if settings.loss.sync_ref_model and (self.reference is None or not self.reference.weights):
            raise ValueError("sync_ref_model=True requires Policy(..., keeps_reference=True, moves_reference=True)")
        self._prepare(settings.learning_rate)
        order = _order_of_content(samples, advantages)
        batch = make_batch(
            [samples[row] for row in order],
            [advantages[row] for row in order],
            pad_id=self._pad_id,
            device=self._model.device,
            weight_version=settings.weight_version,
        )
        batch = self._with_comparisons(batch, settings)
        of_critic: dict[str, float] = {}
        if settings.critic is not None:
            batch = self._with_credit(batch, settings, settings.critic)
            of_critic = explained(batch)
        steps: list[dict[str, float]] = []
        first_pass: dict[int, RowFigures] = {}
        first_step: tuple[Batch, list[RowFigures]] | None = None
        for iteration in range(settings.num_iterations):
            for rows in self._minibatches(batch, settings.minibatch_rollouts):
                part = batch.rows(rows)
                with self._checkpointing(), self._offloading():
                    step, figures = self.micro_batches.retry(lambda part=part: self._gradient(part, settings))
                if step["taken"]:
                    self._take_step(settings.loss)
                first_step = first_step or (part, figures)
                steps.append(step)
                if iteration == 0:
                    first_pass |= {order[int(row)]: each for row, each in zip(rows, figures, strict=True)}
        assert first_step is not None
        moved = self._moved(*first_step, settings.temperature) if any(step["taken"] for step in steps) else {}
        counts = {"rows": len(samples), "rollouts": int(batch.rollouts.max()) + 1, "tokens": int(batch.mask.sum())}
        notes, self.micro_batches.notes = self.micro_batches.notes, []
        all_figures = summary(steps) | moved | of_critic | counts
        return UpdateResult(all_figures, [first_pass[row] for row in range(len(samples))], notes)

    def divergences(self, samples: Sequence[Sample], settings: UpdateSettings) -> list[float]:
        """Return the estimated divergence of each row from the reference, summed over its tokens, from the engine's
        recorded probabilities: (B,)."""
        self._prepare(None)
        batch = make_batch(samples, [0.0] * len(samples), pad_id=self._pad_id, device=self._model.device)
        with self._reference_model() as model:
            reference = self._score(model, batch, settings.temperature).logprobs
        divergence = kl_divergence(batch.logprobs, reference, settings.loss.kl_estimator)  # (B, T)
        return torch.where(batch.mask, divergence, 0.0).sum(dim=1).tolist()

    def prepare_optimizer(self) -> None:
        """Create the state of the default optimizer, as its first step would; others create theirs in that step.

        Raises:
            OutOfMemoryError: the state does not fit into the memory.
        """
        if not self._is_default:
            return
        [adamw] = self.optimizers
        with self._memory_for_state():
            for weight in self.learned.values():
                if not adamw.state[weight]:
                    step = torch.zeros((), dtype=torch.float32, device=weight.device)
                    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
                    adamw.state[weight] = {"step": step, "exp_avg": first, "exp_avg_sq": second}

    @contextmanager
    def _memory_for_state(self) -> Generator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"The state of the optimizer does not fit into the memory of {self._model.device} "
                f"({short_cause(error)}). Try lora={{'r': 16}}, optim='adamw_8bit' or a smaller engine_batch"
            ) from error

    # --- before the first step ---------------------------------------------------------------------------------------

    def _prepare(self, learning_rate: float | None) -> None:
        if learning_rate is not None:
            for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
                group["lr"] = learning_rate * group["initial"] / self._first_rate
        self.prepare_optimizer()
        if not self._is_rehearsed and not any(optimizer.state for optimizer in self.optimizers):
            with self._memory_for_state():
                rehearse(self.optimizers)
        self._is_rehearsed = True
        if self._tries_packing:
            self._tries_packing, self._packed = False, can_pack(self._model)
            if not self._packed:
                kind = self._model.config.model_type
                note = f"the attention of {kind} cannot separate packed rows; rows are padded instead"
                self.micro_batches.notes.append(note)

    def _with_comparisons(self, batch: Batch, settings: UpdateSettings) -> Batch:
        """Return the batch with the further log-probabilities that the loss needs."""
        loss = settings.loss
        has_several_steps = settings.num_iterations > 1 or settings.minibatch_rollouts is not None
        if has_several_steps and (loss.importance_sampling_correction or batch.stale is not None):
            batch = replace(batch, old_logprobs=self._score(self._model, batch, settings.temperature).logprobs)
        if loss.has_kl_loss or (settings.critic is not None and loss.needs_reference):
            with self._reference_model() as model:
                batch = replace(batch, reference_logprobs=self._score(model, batch, settings.temperature).logprobs)
        return batch

    def _with_credit(self, batch: Batch, settings: UpdateSettings, critic: CriticSettings) -> Batch:
        """Return the batch with the values, returns and advantages of `with_credit`."""
        if self._head is None:
            raise ValueError("An update with a critic requires Policy(..., value_learning_rate=...)")
        values = self._score(self._model, batch, settings.temperature, head=self._head).values
        penalty = torch.zeros_like(values)
        if settings.loss.use_kl_in_reward:
            assert batch.reference_logprobs is not None
            kl = kl_divergence(batch.logprobs, batch.reference_logprobs, settings.loss.kl_estimator)
            penalty = torch.where(batch.mask, settings.loss.beta * kl, 0.0)
        return with_credit(batch, values, penalty, critic)

    def _reference_model(self) -> AbstractContextManager[PreTrainedModel]:
        if self.reference is None:
            raise ValueError("A loss with a KL penalty requires Policy(..., keeps_reference=True)")
        return self.reference()

    def _score(self, model: PreTrainedModel, batch: Batch, temperature: float, head: ValueHead | None = None) -> Scores:
        """Return the scores of all rows, without gradient: (B, T) each."""
        result = Scores(*(torch.zeros_like(batch.logprobs) for _ in Scores._fields))
        packed = self._packed and can_pack(model)  # a copy has its own attention

        @torch.no_grad()
        def attempt() -> Scores:
            for rows, part in self.micro_batches.split(batch, packed=packed):
                scores = score(model, part, temperature, packed=packed, head=head)
                for whole, values in zip(result, scores, strict=True):
                    whole[rows, : part.tokens.shape[1]] = values
            return result

        return self.micro_batches.retry(attempt)

    def _minibatches(self, batch: Batch, rollouts: int | None) -> Iterator[Tensor]:
        """Yield the row numbers of each mini-batch: all rows of the next `rollouts` rollouts, in random order."""
        order = list(range(int(batch.rollouts.max()) + 1))
        self.random.shuffle(order)
        size = rollouts or len(order)
        for start in range(0, len(order), size):
            members = torch.tensor(order[start : start + size], device=batch.rollouts.device)
            yield torch.isin(batch.rollouts, members).nonzero()[:, 0]

    # --- one optimizer step ------------------------------------------------------------------------------------------

    def _gradient(self, batch: Batch, settings: UpdateSettings) -> tuple[dict[str, float], list[RowFigures]]:
        """Compute the gradient of the batch, summed over its micro-batches; return the figures of the step, and those
        of each row."""
        self._forget_gradients()
        weights = token_weights(
            batch.mask,
            batch.rollouts,
            settings.loss.aggregates_by,
            constant_length=settings.constant_length,
            share=settings.share,
        )
        tokens, kept_tokens = int(batch.mask.sum()), 0
        if settings.loss.top_entropy_quantile < 1:
            entropy = self._score(self._model, batch, settings.temperature).entropy
            batch = replace(batch, kept=highest_entropy(entropy, batch.mask, settings.loss.top_entropy_quantile))
            kept_tokens = int(batch.kept.sum()) if batch.kept is not None else 0
        padding = passed = 0
        parts: list[dict[str, float]] = []
        of_rows: dict[int, RowFigures] = {}
        for rows, part in self.micro_batches.split(batch, packed=self._packed):
            loss, figures, part_rows = self._loss(
                part, weights[rows, : part.tokens.shape[1]], (tokens, kept_tokens), settings
            )
            loss.backward()
            real = int(part.attention.sum())
            size = real if self._packed else part.attention.numel()
            padding, passed = padding + size - real, passed + size
            parts.append(figures)
            of_rows |= zip(rows, part_rows, strict=True)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.weights.masters.values(), settings.max_grad_norm)
        if self._head is not None:  # of its own: a critic that is far off must not hold the policy back
            head_norm = torch.nn.utils.clip_grad_norm_(self._head.parameters(), settings.max_grad_norm)
            grad_norm = grad_norm if is_finite(head_norm) else head_norm
        figures = {name: sum(part[name] for part in parts) for name in parts[0]}
        figures["max_ratio_error"] = max(part["max_ratio_error"] for part in parts)
        figures["padding_share"] = padding / passed
        is_step = math.isfinite(figures["loss"]) and is_finite(grad_norm)
        return {**figures, "taken": is_step, "grad_norm": float(grad_norm)}, [of_rows[row] for row in sorted(of_rows)]

    def _take_step(self, loss: LossSettings) -> None:
        """Change the weights by the gradient, and the reference if it is time.

        Raises:
            OutOfMemoryError: a step of the optimizer ran out of memory; some weights may have changed.
        """
        self.steps_taken += 1
        try:
            for optimizer in self.optimizers:
                optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"A step of the optimizer ran out of memory of {self._model.device} ({short_cause(error)}), and some "
                "weights may have changed. Start the run again with its run_id, which resumes it from its last "
                "checkpoint, and with less other use of the memory, such as a smaller engine_batch"
            ) from error
        self.weights.publish()
        if loss.sync_ref_model and self.reference and self.steps_taken % loss.ref_model_sync_steps == 0:
            self.reference.mix(loss.ref_model_mixup_alpha, self.weights.masters)

    def _loss(
        self, batch: Batch, weights: Tensor, counts: tuple[int, int], settings: UpdateSettings
    ) -> tuple[Tensor, dict[str, float], list[RowFigures]]:
        """Return the loss of a micro-batch with its gradient, its figures, and those of its rows; see `BatchInputs` for
        `weights`. `counts`: its `tokens` and `kept_tokens`."""
        tokens, kept_tokens = counts
        logprobs, entropy, values = score(
            self._model,
            batch,
            settings.temperature,
            packed=self._packed,
            entropy_gradient=settings.loss.entropy_coef > 0,
            head=None if settings.critic is None else self._head,
        )
        inputs = BatchInputs(
            mask=batch.mask,
            advantages=batch.advantages,
            weights=weights,
            tokens=tokens,
            sampler_logprobs=batch.logprobs,
            old_logprobs=batch.old_logprobs,
            reference_logprobs=batch.reference_logprobs,
            stale=batch.stale,
            kept=batch.kept,
            kept_tokens=kept_tokens,
        )
        of_policy = policy_loss(settings.loss, inputs, logprobs, entropy)
        loss, figures = of_policy.loss, of_policy.figures()
        if batch.stale is not None:
            figures |= stale_figures(logprobs, batch.logprobs, batch.mask, batch.stale, tokens)
        if (critic := settings.critic) is not None:
            assert batch.values is not None
            assert batch.returns is not None
            cliprange = critic.cliprange_value
            of_values = value_loss(values, batch.values, batch.returns, weights, cliprange=cliprange, tokens=tokens)
            loss = loss + critic.vf_coef * of_values.loss
            figures["value_loss"] = float(of_values.loss.detach())
            figures["value_clip_fraction"] = float(of_values.clip_fraction)
            figures["loss"] = float(loss.detach())
        return loss, figures, row_figures(batch, logprobs, entropy, of_policy)

    def _moved(self, batch: Batch, figures: Sequence[RowFigures], temperature: float) -> dict[str, float]:
        """Return the distance of the policy from that before the first optimizer step, on some rows: the mean of the
        estimate k3 of KL(before || after) over their fresh tokens, or over all if none is fresh."""
        rows = measured_rows(batch.attention.sum(dim=1).tolist())
        part = batch.rows(torch.tensor(rows, device=batch.tokens.device))
        columns = [figures[row]["trainer_logprobs"] for row in rows]
        before = torch.from_numpy(np.concatenate(columns)).to(batch.tokens.device)  # (N,), row by row
        kl = kl_divergence(before, self._score(self._model, part, temperature).logprobs[part.mask])
        if part.stale is not None and (part.mask & ~part.stale).any():
            kl = kl[~part.stale[part.mask]]
        return {"update_kl": float(kl.mean())}

    def _forget_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._model.zero_grad(set_to_none=True)


def _listed(advantage: float | Sequence[float]) -> list[float]:
    return [advantage] if isinstance(advantage, (int, float)) else list(advantage)


def _order_of_content(samples: Sequence[Sample], advantages: Sequence[float | Sequence[float]]) -> list[int]:
    """Return the row numbers in an order that depends only on the content of the rows, not on their order or ids.

    The rows of a rollout are adjacent.
    """
    keys = [
        (list(sample.token_ids), list(sample.logprobs), list(sample.mask), _listed(advantage))
        for sample, advantage in zip(samples, advantages, strict=False)  # `make_batch` refuses a wrong number
    ]
    rollouts: dict[str, list[int]] = {}
    for row in sorted(range(len(keys)), key=keys.__getitem__):
        rollouts.setdefault(samples[row].rollout_id, []).append(row)
    return [row for rows in sorted(rollouts.values(), key=lambda rows: [keys[row] for row in rows]) for row in rows]
