"""The policy that learns: a causal model, its tokenizer and its optimizer, with the operations GRPO needs of them.

Who generates and who updates take turns: both hold `Policy.lock` while they touch the weights.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.algorithm.grpo.learner.batch import Batch, make_batch
from agentlightning.algorithm.grpo.learner.torch_setup import SMALL_MODEL_PARAMETERS, no_progress_bar, one_thread
from agentlightning.algorithm.grpo.losses.objective import Objective, clipped_objective, is_finite, token_weights
from agentlightning.algorithm.grpo.settings import Aggregation
from agentlightning.private_files import private_folder

if TYPE_CHECKING:
    from agentlightning.adapter.rows.samples import Sample


class Policy:
    """A causal language model that is trained in place.

    Attributes:
        model: the live weights, always in evaluation mode: without dropout the ratio of the first pass is one.
        tokenizer: with its chat template.
        weight_version: 0 as loaded, one more with every update that took a step.
        lock: held by whoever reads or writes the weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        learning_rate: float = 1e-5,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.99),
        lora: Mapping[str, object] | None = None,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        """Take the model over.

        Args:
            learning_rate: of AdamW, constant; so is `weight_decay`.
            betas: of AdamW; the second is below the usual 0.999 because a run may have only some dozen steps.
            lora: arguments of `peft.LoraConfig` (such as `{"r": 16}`); then only the adapters learn.
            seed: of the adapters' first weights and of the order of the mini-batches.

        Raises:
            ValueError: The tokenizer has no chat template or no end-of-sequence token.
        """
        if not tokenizer.chat_template or tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path or 'the policy'} needs a chat template (to render messages) "
                "and an end-of-sequence token (to know when a reply is over)"
            )
        self.model: PreTrainedModel = model if lora is None else _with_lora(model, lora, seed)
        cast("torch.nn.Module", self.model).to(device).eval()  # transformers wraps `to` and loses its types
        self.tokenizer = tokenizer
        self.weight_version = 0
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._learned = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._learned, lr=learning_rate, betas=betas, weight_decay=weight_decay)

    @classmethod
    def load(cls, path: str | Path, *, dtype: torch.dtype = torch.float32, **settings: Any) -> Policy:
        """Load model and tokenizer from a folder (or a name in the local cache); `settings` as for the constructor."""
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        with no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, local_files_only=True, attn_implementation="sdpa"
            )
        return cls(model, tokenizer, **settings)

    def save(self, path: str | Path) -> None:
        """Write model and tokenizer, so that `AutoModelForCausalLM.from_pretrained(path)` loads the current weights.

        LoRA adapters are merged into the written copy.
        """
        private_folder(path)
        with self.lock, no_progress_bar():
            self._merged().save_pretrained(path)
        self.tokenizer.save_pretrained(path)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a reply: the tokenizer's and those of the generation settings."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        several = cast("list[int | None]", configured if isinstance(configured, list) else [configured])
        own = cast("int | None", self.tokenizer.eos_token_id)
        return frozenset(token for token in (own, *several) if token is not None)

    @property
    def is_small(self) -> bool:
        """True if the model's operations are too short to be shared by several threads of a CPU."""
        return sum(parameter.numel() for parameter in self.model.parameters()) < SMALL_MODEL_PARAMETERS

    @property
    def context_length(self) -> int:
        """Tokens of prompt and reply together that the model can attend to."""
        config = self.model.config
        return min(config.max_position_embeddings, getattr(config, "sliding_window", None) or 1 << 60)

    def gives_probabilities(self) -> bool:
        """Return whether all weights are finite and the model gives finite logits for the shortest prompt.

        Without, nothing can be sampled or learned.
        """
        with self.lock, torch.inference_mode():
            if not all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
                return False
            shortest = torch.tensor([[self.tokenizer.eos_token_id]], device=self.model.device)  # (1, 1)
            return bool(self.model(input_ids=shortest).logits.isfinite().all())

    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Tensor:
        """Return the natural log-probability of each masked token given all before it, 0 elsewhere: (B, T)."""
        return self._score(batch, temperature)[0]

    def update(
        self,
        samples: Sequence[Sample],
        advantages: Sequence[float],
        *,
        num_iterations: int = 1,
        minibatch_rollouts: int | None = None,
        rows_per_forward: int = 64,
        epsilon: float = 0.2,
        epsilon_high: float | None = 0.28,
        aggregation: Aggregation = "token",
        temperature: float = 1.0,
        max_grad_norm: float = 1.0,
        learning_rate: float | None = None,
    ) -> dict[str, float]:
        """Learn from the rows and return figures of the update.

        Each of the `num_iterations` passes goes over the rollouts in a new order and takes one optimizer step per
        `minibatch_rollouts` of them (None: all at once); the rows of a rollout stay together. A step whose loss or
        gradient is not finite is left out and counted.

        Args:
            advantages: (B,) one per row: that of its rollout.
            rows_per_forward: rows that go through the model at once; bounds the memory, does not change the result.
            temperature: the one at which the rows were sampled.
            learning_rate: from this update on; None keeps the one before.

        Returns:
            Means over the steps of `loss`, `clip_fraction`, `approx_kl`, `entropy` (nats) and `grad_norm` (before it
            is clipped), NaN if every step was skipped; `first_ratio_error`, the greatest distance of a ratio from one
            before the first step; and the counts `steps`, `skipped_steps`, `rows`, `rollouts`, `tokens`.

        Raises:
            ValueError: A row is malformed (see `make_batch`) or a setting is out of its range.
        """
        clip = (epsilon, epsilon if epsilon_high is None else epsilon_high)
        _check_settings(num_iterations, minibatch_rollouts, rows_per_forward, clip, temperature)
        batch = make_batch(samples, advantages, pad_id=self._pad_id, device=self.model.device)
        figures: list[dict[str, float]] = []
        if learning_rate is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
        with self.lock, one_thread() if self.is_small else nullcontext():
            for _ in range(num_iterations):
                for rows in self._minibatches(batch, minibatch_rollouts):
                    minibatch = batch.rows(rows)
                    weights = token_weights(minibatch.mask, minibatch.rollouts, aggregation)
                    figures.append(
                        self._descend(minibatch, weights, rows_per_forward, clip, temperature, max_grad_norm)
                    )
            self.weight_version += any(figure["taken"] for figure in figures)
        counts = {"rows": len(samples), "rollouts": int(batch.rollouts.max()) + 1, "tokens": int(batch.mask.sum())}
        return _summary(figures) | counts

    def _merged(self) -> PreTrainedModel:
        """Return the model, or a copy with the adapters merged in."""
        if not hasattr(self.model, "merge_and_unload"):
            return self.model
        adapted: Any = copy.deepcopy(self.model)
        return adapted.merge_and_unload()

    @property
    def _pad_id(self) -> int:
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        return cast("int", pad if pad is not None else end)

    def _score(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and, without gradient, entropies of the masked tokens, 0 elsewhere: (B, T) each."""
        logits = self.model(input_ids=batch.tokens, attention_mask=batch.attention, use_cache=False).logits  # (B, T, V)
        wanted = batch.mask[:, 1:]  # (B, T-1): token t is predicted at t-1
        distribution = (logits[:, :-1][wanted].float() / temperature).log_softmax(dim=-1)  # (N, V), N masked tokens
        chosen = distribution.gather(1, batch.tokens[:, 1:][wanted][:, None])[:, 0]  # (N,)
        with torch.no_grad():
            entropy = -(distribution.exp() * distribution).sum(dim=-1)  # (N,)
        empty = torch.zeros(batch.mask.shape, device=chosen.device)
        return empty.masked_scatter(batch.mask, chosen), empty.masked_scatter(batch.mask, entropy)

    def _minibatches(self, batch: Batch, rollouts: int | None) -> Iterator[Tensor]:
        """Yield the row numbers of each mini-batch: all rows of the next `rollouts` rollouts, in random order."""
        order = list(range(int(batch.rollouts.max()) + 1))
        self._random.shuffle(order)
        size = rollouts or len(order)
        for start in range(0, len(order), size):
            chosen = torch.tensor(order[start : start + size], device=batch.rollouts.device)
            yield torch.isin(batch.rollouts, chosen).nonzero()[:, 0]

    def _descend(
        self,
        batch: Batch,
        weights: Tensor,
        rows_per_forward: int,
        clip: tuple[float, float],
        temperature: float,
        max_grad_norm: float,
    ) -> dict[str, float]:
        """Take one optimizer step on the batch, the gradient summed over forwards of `rows_per_forward` rows."""
        self._optimizer.zero_grad(set_to_none=True)
        parts: list[tuple[Objective, Tensor]] = []
        for rows in torch.arange(len(batch.tokens), device=weights.device).split(rows_per_forward):
            part = batch.rows(rows)
            part_weights = weights[rows, : part.tokens.shape[1]]
            logprobs, entropy = self._score(part, temperature)
            objective = clipped_objective(logprobs, part.logprobs, part.advantages, part_weights, clip)
            objective.loss.backward()
            parts.append((objective.detached(), (part_weights * entropy).sum()))
        grad_norm = torch.nn.utils.clip_grad_norm_(self._learned, max_grad_norm)
        loss = torch.stack([objective.loss for objective, _ in parts]).sum()
        taken = is_finite(loss, grad_norm)
        if taken:
            self._optimizer.step()
        return {
            "taken": taken,
            "loss": float(loss),
            "clip_fraction": sum(float(objective.clip_fraction) for objective, _ in parts),
            "approx_kl": sum(float(objective.approx_kl) for objective, _ in parts),
            "entropy": sum(float(entropy) for _, entropy in parts),
            "grad_norm": float(grad_norm),
            "ratio_error": max(float(objective.max_ratio_error) for objective, _ in parts),
        }


def _summary(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    taken = [figure for figure in figures if figure["taken"]]
    names = ("loss", "clip_fraction", "approx_kl", "entropy", "grad_norm")
    means = {name: sum(figure[name] for figure in taken) / len(taken) if taken else float("nan") for name in names}
    return means | {
        "first_ratio_error": figures[0]["ratio_error"],
        "steps": len(taken),
        "skipped_steps": len(figures) - len(taken),
    }


def _check_settings(
    num_iterations: int,
    minibatch_rollouts: int | None,
    rows_per_forward: int,
    clip: tuple[float, float],
    temperature: float,
) -> None:
    counts = {
        "num_iterations": num_iterations,
        "minibatch_rollouts": minibatch_rollouts,
        "rows_per_forward": rows_per_forward,
    }
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if not (0 < clip[0] < 1 and clip[1] > 0):
        raise ValueError(f"epsilon must be above 0 and below 1, epsilon_high above 0, not {clip[0]} and {clip[1]}")
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0 to learn from what was sampled, not {temperature}")


def _with_lora(model: PreTrainedModel, settings: Mapping[str, Any], seed: int) -> PreTrainedModel:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        return adapted
