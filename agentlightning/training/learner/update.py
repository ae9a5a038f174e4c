"""One update of the weights: passes over the rows, mini-batches, optimizer steps, and what the loss saw of each token.

What an update does is a function of the learned weights, the optimizer's state, the random state and the rows as a
multiset: rollouts are brought into an order of their own, by content, before anything is drawn or summed. On a CPU,
with the same number of threads, equal inputs give equal bits, whatever the order of the rows and the process.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.engine.torch_setup import free_cached_memory, is_out_of_memory, short_cause
from agentlightning.errors import OutOfMemoryError
from agentlightning.training.batch import Batch, make_batch
from agentlightning.training.learner.forward import Scores, can_pack, microbatches, score
from agentlightning.training.learner.weights import Checkpointing, LearnedWeights, Reference, ValueHead
from agentlightning.training.losses.critic import explained, value_loss, with_credit
from agentlightning.training.losses.importance import stale_figures
from agentlightning.training.losses.kl import kl_divergence
from agentlightning.training.losses.objective import LossInputs, PolicyLoss, is_finite, policy_loss
from agentlightning.training.losses.weights import token_weights
from agentlightning.training.settings import CriticSettings, LossSettings

if TYPE_CHECKING:
    from agentlightning.adapter.rows.samples import Sample

_T = TypeVar("_T")
MEASURED_TOKENS = 2048
"""About so many tokens are gone over once more after the last optimizer step; rows spread over those of the first."""


@dataclass(frozen=True, slots=True)
class RowFigures:
    """What the loss used of one row on the first pass over it: (R,) each, one per trained token in order.

    Of a trainer that keeps the inside of its loss to itself (VERL), what the loss began with: the others are None.

    Attributes:
        engine_logprobs: float32, natural log-probability when the token was sampled.
        trainer_logprobs: float32, the learner's own, when the row was first gone over.
        entropy: float32, nats, of the learner's distribution.
        ratio: float32, of the learner's probability to the engine's, or to the learner's own before the first optimizer
            step; see `TokenFigures` for this and the next four.
        clipped: uint8, which bound of the ratio counts; 0 for none.
        weight: float32, share of the token in the loss of its optimizer step.
        correction: float32, for what engine and learner differ in; of a stale token, for what older weights do.
        kl: float32, divergence from the reference.
        advantage: float32.
        value: float32, of the critic before its first optimizer step; None without a critic.
        returns: float32, what that is to become; None without a critic.
    """

    engine_logprobs: NDArray[np.float32]
    trainer_logprobs: NDArray[np.float32] | None
    entropy: NDArray[np.float32] | None
    ratio: NDArray[np.float32] | None
    clipped: NDArray[np.uint8] | None
    weight: NDArray[np.float32] | None
    correction: NDArray[np.float32] | None
    kl: NDArray[np.float32] | None
    advantage: NDArray[np.float32]
    value: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None


def row_figures(batch: Batch, logprobs: Tensor, entropy: Tensor, found: PolicyLoss) -> list[RowFigures]:
    """Return what the loss saw of each row of `batch`; `logprobs` and `entropy` are (B, T), of the learner."""
    mask, seen = batch.mask, found.tokens
    advantages = batch.advantages.expand_as(mask)
    of_loss = (seen.ratio, seen.clipped, seen.weight, seen.correction, seen.kl)
    columns = (batch.logprobs, logprobs.detach(), entropy.detach(), *of_loss, advantages)
    if batch.values is not None and batch.returns is not None:
        columns = (*columns, batch.values, batch.returns)
    ends = mask.sum(dim=1).cumsum(dim=0)[:-1].cpu().numpy()
    split = [np.split(column[mask].cpu().numpy(), ends) for column in columns]
    return [RowFigures(*row) for row in zip(*split, strict=True)]


def summary(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of the optimizer steps that were taken, and how many were; NaN where none was. Of the first one
    also how far engine and learner are apart on fresh tokens, and the weights of stale ones, where it has any."""
    taken = [figure for figure in figures if figure["taken"]]
    names = ["loss", "clip_fraction", "approx_kl", "kl", "entropy", "grad_norm"]
    more = ("value_loss", "value_clip_fraction", "stale_kl", "fresh_kl", "stale_share")
    names += [name for name in more if name in figures[0]]
    means = {name: sum(figure[name] for figure in taken) / len(taken) if taken else float("nan") for name in names}
    stale = figures[0].get("stale_share", 0.0)
    if stale < 1.0:
        means["first_ratio_error"] = figures[0]["max_ratio_error"]
    if stale > 0.0:
        means["first_stale_kl"] = figures[0]["stale_kl"] / stale
    return means | {
        "steps": len(taken),
        "skipped_steps": len(figures) - len(taken),
    }


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update did.

    Attributes:
        figures: see `Policy.update`.
        rows: (B,) figures of each row that the loss used, in the order of the samples.
        notes: what the user should hear of, such as a lack of memory.
    """

    figures: dict[str, float]
    rows: list[RowFigures]
    notes: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """How an update goes over its rows; see `GRPOSettings` for what each means."""

    num_iterations: int = 1
    minibatch_rollouts: int | None = None
    loss: LossSettings = field(default_factory=LossSettings)
    critic: CriticSettings | None = None
    constant_length: int | None = None
    share: float = 1.0
    temperature: float = 1.0
    max_grad_norm: float = 1.0
    weight_version: int | None = None
    """Of the weights before the update; tokens that others sampled are stale. None treats all tokens alike."""

    def __post_init__(self) -> None:
        for name in ("num_iterations", "minibatch_rollouts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0 to learn from what was sampled, not {self.temperature}")

    def needs_old_logprobs(self, *, some_are_stale: bool) -> bool:
        """Whether the loss compares with the learner before its first optimizer step, and there is more than one."""
        several = self.num_iterations > 1 or self.minibatch_rollouts is not None
        return several and (self.loss.importance_sampling_correction or some_are_stale)


def measured_rows(lengths: Sequence[int]) -> list[int]:
    """Return the numbers of rows, spread over all, that have about `MEASURED_TOKENS` tokens together."""
    return list(range(0, len(lengths), max(1, -(-sum(lengths) // MEASURED_TOKENS))))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """How the weights of a policy learn.

    Attributes:
        learning_rate: of AdamW, constant; so is `weight_decay`.
        betas: of AdamW; the second is below the usual 0.999 because a run may have only some dozen steps.
        seed: of the order of the mini-batches.
        max_tokens_per_forward: how many tokens of rows go through the model at once; a longer row goes alone. Bounds
            the memory, does not change the result but for the last bits.
        padding_free: put the rows of a forward into one sequence instead of padding them; see `forward.py`.
        gradient_checkpointing: keep less for the backward pass and compute it anew.
        keeps_reference: for a loss with a penalty towards the model as it was loaded; see `Reference`.
        value_learning_rate: of a value head, for updates with a critic; None makes none.
    """

    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    seed: int = 0
    max_tokens_per_forward: int = 4096
    padding_free: bool = True
    gradient_checkpointing: bool = False
    keeps_reference: bool = False
    value_learning_rate: float | None = None


class Optimizer:
    """The optimizer of one model and what it needs to take a step. Used by one thread, while nothing is generated.

    Attributes:
        max_tokens: as set, or lowered after a lack of memory.
        steps_taken: optimizer steps since the start, those of an update that ended in an error too.
    """

    def __init__(self, model: PreTrainedModel, pad_id: int, options: OptimizerOptions) -> None:
        self._model = model
        self._pad_id = pad_id
        self._reference = Reference(model) if options.keeps_reference else None
        self._random = random.Random(options.seed)
        self.max_tokens = options.max_tokens_per_forward
        self._wants_packing, self._packed = options.padding_free, False
        self._checkpointing = Checkpointing(model) if options.gradient_checkpointing else nullcontext
        self.weights = LearnedWeights(model)
        self._head = None if options.value_learning_rate is None else ValueHead(model)
        self._first_rate = rate = options.learning_rate
        groups: list[dict[str, Any]] = [{"params": list(self.weights.masters.values()), "initial": rate}]
        if self._head is not None:
            groups.append({"params": list(self._head.parameters()), "initial": options.value_learning_rate})
        # fused: it needs no memory beside its state, so that a step that has begun cannot fail half-way for want of it
        fused = model.device.type in ("cpu", "cuda")
        self.adamw = torch.optim.AdamW(
            groups, lr=rate, betas=options.betas, weight_decay=options.weight_decay, fused=fused
        )
        self.steps_taken = 0
        self._notes: list[str] = []
        self._looked = False

    def update(
        self,
        samples: Sequence[Sample],
        advantages: Sequence[float],
        settings: UpdateSettings,
        learning_rate: float | None = None,
    ) -> UpdateResult:
        """Take the optimizer's steps; see `Policy.update`."""
        self._prepare(learning_rate)
        order = _order_of_content(samples, advantages)
        batch = make_batch(
            [samples[row] for row in order],
            [advantages[row] for row in order],
            pad_id=self._pad_id,
            device=self._model.device,
            weight_version=settings.weight_version,
        )
        batch = self._with_what_the_loss_compares_with(batch, settings)
        of_critic: dict[str, float] = {}
        if settings.critic is not None:
            batch = self._with_credit(batch, settings, settings.critic)
            of_critic = explained(batch)
        figures: list[dict[str, float]] = []
        first_pass: dict[int, RowFigures] = {}
        first: tuple[Batch, list[RowFigures]] | None = None
        for iteration in range(settings.num_iterations):
            for rows in self._minibatches(batch, settings.minibatch_rollouts):
                part = batch.rows(rows)
                step, seen = self._step(part, settings)
                first = first or (part, seen)
                figures.append(step)
                if iteration == 0:
                    first_pass |= {order[int(row)]: one for row, one in zip(rows, seen, strict=True)}
        assert first is not None
        moved = self._moved(*first, settings.temperature) if any(step["taken"] for step in figures) else {}
        counts = {"rows": len(samples), "rollouts": int(batch.rollouts.max()) + 1, "tokens": int(batch.mask.sum())}
        notes, self._notes = self._notes, []
        return UpdateResult(
            summary(figures) | moved | of_critic | counts, [first_pass[row] for row in range(len(samples))], notes
        )

    def _moved(self, batch: Batch, seen: Sequence[RowFigures], temperature: float) -> dict[str, float]:
        """Return how far the policy is from that before the first optimizer step, on rows of it that `seen` tells of:
        the estimate k3 of KL(before || after), its mean over their fresh tokens, over all if none is fresh."""
        rows = measured_rows(batch.attention.sum(dim=1).tolist())
        part = batch.rows(torch.tensor(rows, device=batch.tokens.device))
        columns = [column for row in rows if (column := seen[row].trainer_logprobs) is not None]
        before = torch.from_numpy(np.concatenate(columns)).to(batch.tokens.device)  # (N,), row by row
        kl = kl_divergence(before, self._logprobs(self._model, part, temperature)[part.mask])
        if part.stale is not None and (part.mask & ~part.stale).any():
            kl = kl[~part.stale[part.mask]]
        return {"update_kl": float(kl.mean())}

    def divergences(self, samples: Sequence[Sample], settings: UpdateSettings) -> list[float]:
        """Return the estimated divergence of each row from the reference, summed over its tokens, by the probabilities
        that the engine recorded: (B,)."""
        self._prepare(None)
        batch = make_batch(samples, [0.0] * len(samples), pad_id=self._pad_id, device=self._model.device)
        with self._reference_model() as model:
            reference = self._logprobs(model, batch, settings.temperature)
        divergence = kl_divergence(batch.logprobs, reference, settings.loss.kl_estimator)  # (B, T)
        return torch.where(batch.mask, divergence, 0.0).sum(dim=1).tolist()

    def _reference_model(self) -> AbstractContextManager[PreTrainedModel]:
        if self._reference is None:
            raise ValueError("a loss with a penalty towards a reference needs Policy(..., keeps_reference=True)")
        return self._reference.switched_on()

    def _with_what_the_loss_compares_with(self, batch: Batch, settings: UpdateSettings) -> Batch:
        """Return the batch with the log-probabilities that the loss needs beside the engine's."""
        if settings.needs_old_logprobs(some_are_stale=batch.stale is not None):
            batch = replace(batch, old_logprobs=self._logprobs(self._model, batch, settings.temperature))
        if settings.loss.has_kl_loss or (settings.critic is not None and settings.loss.needs_reference):
            with self._reference_model() as model:
                batch = replace(batch, reference_logprobs=self._logprobs(model, batch, settings.temperature))
        return batch

    def _with_credit(self, batch: Batch, settings: UpdateSettings, critic: CriticSettings) -> Batch:
        """Return the batch with what `with_credit` makes of the rewards of its rollouts."""
        if self._head is None:
            raise ValueError("an update with a critic needs Policy(..., value_learning_rate=...)")
        values = self._scored(self._model, batch, settings.temperature, head=self._head).values
        penalty = torch.zeros_like(values)
        if settings.loss.use_kl_in_reward:
            assert batch.reference_logprobs is not None
            kl = kl_divergence(batch.logprobs, batch.reference_logprobs, settings.loss.kl_estimator)
            penalty = torch.where(batch.mask, settings.loss.beta * kl, 0.0)
        return with_credit(batch, values, penalty, critic)

    def _logprobs(self, model: PreTrainedModel, batch: Batch, temperature: float) -> Tensor:
        """Return the log-probabilities of all rows, without gradient: (B, T)."""
        return self._scored(model, batch, temperature).logprobs

    def _scored(
        self, model: PreTrainedModel, batch: Batch, temperature: float, head: ValueHead | None = None
    ) -> Scores:
        """Return the scores of all rows, without gradient: (B, T) each."""
        result = Scores(*(torch.zeros_like(batch.logprobs) for _ in Scores._fields))
        lengths: list[int] = batch.attention.sum(dim=1).tolist()
        packed = self._packed and can_pack(model)  # a copy has an attention of its own

        @torch.no_grad()
        def attempt(in_hand: list[Batch]) -> Scores:
            for rows in microbatches(lengths, self.max_tokens, packed=packed):
                part = batch.rows(torch.tensor(rows, device=batch.tokens.device))
                in_hand.append(part)
                scores = score(model, part, temperature, packed=packed, head=head)
                for whole, one in zip(result, scores, strict=True):
                    whole[rows, : part.tokens.shape[1]] = one
            return result

        return self._within_memory(attempt)

    @property
    def learned(self) -> dict[str, torch.nn.Parameter]:
        """What learns, by name: the weights of the policy, and those of the value head if there is one."""
        return {**self.weights.masters, **({} if self._head is None else self._head.learned())}

    def random_state(self) -> object:
        """Return the state of the order of mini-batches, as JSON data."""
        return self._random.getstate()

    def set_random_state(self, state: Any) -> None:
        """Go on from what `random_state` returned, before or after it was JSON."""
        version, numbers, gauss = state
        self._random.setstate((version, tuple(numbers), gauss))

    def prepare_optimizer(self) -> None:
        """Make the optimizer's state, as its first step would.

        Raises:
            OutOfMemoryError: it is too much for the memory.
        """
        try:
            for weight in self.learned.values():
                if not self.adamw.state[weight]:
                    step = torch.zeros((), dtype=torch.float32, device=weight.device)
                    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
                    self.adamw.state[weight] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"the state of the optimizer is too much for the memory of {self._model.device} "
                f"({short_cause(error)}). Try lora={{'r': 16}} or a smaller engine_batch"
            ) from error

    def _prepare(self, learning_rate: float | None) -> None:
        if learning_rate is not None:
            for group in self.adamw.param_groups:
                group["lr"] = learning_rate * group["initial"] / self._first_rate
        self.prepare_optimizer()
        if self._wants_packing and not self._looked:
            self._looked = True
            self._packed = can_pack(self._model)
            if not self._packed:
                kind = self._model.config.model_type
                self._notes.append(f"the attention of {kind} cannot keep packed rows apart: rows are padded instead")

    def _minibatches(self, batch: Batch, rollouts: int | None) -> Iterator[Tensor]:
        """Yield the row numbers of each mini-batch: all rows of the next `rollouts` rollouts, in random order."""
        order = list(range(int(batch.rollouts.max()) + 1))
        self._random.shuffle(order)
        size = rollouts or len(order)
        for start in range(0, len(order), size):
            chosen = torch.tensor(order[start : start + size], device=batch.rollouts.device)
            yield torch.isin(batch.rollouts, chosen).nonzero()[:, 0]

    def _step(self, batch: Batch, settings: UpdateSettings) -> tuple[dict[str, float], list[RowFigures]]:
        """Take one optimizer step; for want of memory begin it again, from the same weights, with smaller forwards."""
        with self._checkpointing():
            return self._within_memory(lambda in_hand: self._descend(batch, settings, in_hand))

    def _within_memory(self, attempt: Callable[[list[Batch]], _T]) -> _T:
        """Return what an attempt returns; for want of memory make another one with smaller forwards.

        An attempt puts the rows of each forward in its list before it takes place.

        Raises:
            OutOfMemoryError: one row is too much.
        """
        while True:
            in_hand: list[Batch] = []
            try:
                return attempt(in_hand)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not in_hand:
                    raise
                cause = short_cause(error)
            self._shrink(in_hand[-1], cause)  # here the frames of the error are gone, and their tensors with them

    def _shrink(self, failed: Batch, cause: str) -> None:
        """Let the next attempt take half as many tokens at once as the forward that failed."""
        self._forget_gradients()
        rows, tokens = len(failed.tokens), int(failed.attention.sum())
        free_cached_memory(self._model.device)
        if rows == 1:
            raise OutOfMemoryError(
                f"one row of {tokens} tokens is too much for the memory of {self._model.device} ({cause}); this "
                "optimizer step changed no weight. Try gradient_checkpointing=True, lora={'r': 16}, bf16=True, or "
                "shorter rows"
            )
        self.max_tokens = tokens // 2
        self._notes.append(
            f"out of memory with {rows} rows of {tokens} tokens in one forward ({cause}): the optimizer step was begun "
            f"again from the same weights, and from here on a forward takes at most {self.max_tokens} tokens; "
            f"set max_tokens_per_forward={self.max_tokens} to begin with that"
        )

    def _forget_gradients(self) -> None:
        self.adamw.zero_grad(set_to_none=True)
        self._model.zero_grad(set_to_none=True)

    def _descend(
        self, batch: Batch, settings: UpdateSettings, in_hand: list[Batch]
    ) -> tuple[dict[str, float], list[RowFigures]]:
        """Take one optimizer step on the batch, the gradient summed over forwards of `max_tokens` tokens."""
        self._forget_gradients()
        weights = token_weights(
            batch.mask,
            batch.rollouts,
            settings.loss.aggregates_by,
            constant_length=settings.constant_length,
            share=settings.share,
        )
        tokens = int(batch.mask.sum())
        lengths: list[int] = batch.attention.sum(dim=1).tolist()
        parts: list[dict[str, float]] = []
        seen: dict[int, RowFigures] = {}
        for rows in microbatches(lengths, self.max_tokens, packed=self._packed):
            part = batch.rows(torch.tensor(rows, device=batch.tokens.device))
            in_hand.append(part)
            inputs = LossInputs(
                mask=part.mask,
                advantages=part.advantages,
                weights=weights[rows, : part.tokens.shape[1]],
                tokens=tokens,
                sampler_logprobs=part.logprobs,
                old_logprobs=part.old_logprobs,
                reference_logprobs=part.reference_logprobs,
                stale=part.stale,
            )
            rewarded = settings.loss.entropy_coef > 0
            logprobs, entropy, values = score(
                self._model,
                part,
                settings.temperature,
                packed=self._packed,
                entropy_gradient=rewarded,
                head=None if settings.critic is None else self._head,
            )
            of_policy = policy_loss(settings.loss, inputs, logprobs, entropy)
            whole, figures = of_policy.loss, of_policy.figures()
            if part.stale is not None:
                figures |= stale_figures(logprobs, part.logprobs, part.mask, part.stale, tokens)
            if (critic := settings.critic) is not None:
                assert part.values is not None
                assert part.returns is not None
                held = critic.cliprange_value
                of_values = value_loss(values, part.values, part.returns, inputs.weights, cliprange=held, tokens=tokens)
                whole = whole + critic.vf_coef * of_values.loss
                figures |= {
                    "value_loss": float(of_values.loss.detach()),
                    "value_clip_fraction": float(of_values.clip_fraction),
                }
                figures["loss"] = float(whole.detach())
            whole.backward()
            parts.append(figures)
            seen |= zip(rows, row_figures(part, logprobs, entropy, of_policy), strict=True)
        learned = self.weights.masters.values()
        grad_norm = torch.nn.utils.clip_grad_norm_(learned, settings.max_grad_norm)
        if self._head is not None:  # of its own: a critic that is far off must not hold the policy back
            head_norm = torch.nn.utils.clip_grad_norm_(self._head.parameters(), settings.max_grad_norm)
            grad_norm = grad_norm if is_finite(head_norm) else head_norm
        figures = {name: sum(part[name] for part in parts) for name in parts[0]}
        figures["max_ratio_error"] = max(part["max_ratio_error"] for part in parts)
        taken = math.isfinite(figures["loss"]) and is_finite(grad_norm)
        if taken:
            self.steps_taken += 1
            self.adamw.step()
            self.weights.publish()
        return {**figures, "taken": taken, "grad_norm": float(grad_norm)}, [seen[row] for row in range(len(lengths))]


def _order_of_content(samples: Sequence[Sample], advantages: Sequence[float]) -> list[int]:
    """Return the row numbers in an order that depends on what the rows hold, and neither on their order nor on ids.

    The rows of a rollout stand together.
    """
    keys = [
        (list(sample.token_ids), list(sample.logprobs), list(sample.mask), advantage)
        for sample, advantage in zip(samples, advantages, strict=False)  # `make_batch` refuses a wrong number
    ]
    rollouts: dict[str, list[int]] = {}
    for row in sorted(range(len(keys)), key=keys.__getitem__):
        rollouts.setdefault(samples[row].rollout_id, []).append(row)
    return [row for rows in sorted(rollouts.values(), key=lambda rows: [keys[row] for row in rows]) for row in rows]
