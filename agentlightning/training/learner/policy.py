"""The policy that learns: a causal model, its tokenizer and its optimizer, with the operations that GRPO needs.

Generation and update alternate: both hold `Policy.lock` while they use the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from agentlightning.engine.served import ServedModel, load_model
from agentlightning.engine.torch_setup import one_thread, return_freed_memory
from agentlightning.training.batch import Batch
from agentlightning.training.learner.figures import UpdateResult
from agentlightning.training.learner.forward import score
from agentlightning.training.learner.optimizers import restore_state, state_of
from agentlightning.training.learner.parameters import PREFIX, with_lora
from agentlightning.training.learner.update import Optimizer, UpdateSettings

if TYPE_CHECKING:
    from agentlightning.adapter.rows.samples import Sample


@dataclass(frozen=True, slots=True)
class PolicyState:
    """The complete state of training: from equal states, later updates are identical, bit for bit."""

    weights: dict[str, Tensor]
    """The trained weights by name, float32: of the model or its adapters, and of a value head."""
    optim: str
    """Name of the optimizer."""
    optimizer: dict[str, Any]
    """Tensors and numbers that the optimizer keeps for each of them, as `KIND/NAME`, such as `exp_avg/NAME`; empty
    before the first step of an optimizer other than the default."""
    random: object
    """Random state of the order of mini-batches, as JSON data."""
    weight_version: int
    max_tokens_per_forward: int
    """The setting `max_tokens_per_forward`, or a lower value after a lack of memory."""
    steps_taken: int
    """Number of optimizer steps."""
    reference: dict[str, Tensor]
    """The weights of a reference that moves, by name; else empty."""


class Policy(ServedModel):
    """A causal language model that is trained in place, always in evaluation mode: without dropout the ratio of the
    first pass is one. An update with at least one step creates a new `weight_version`, even if it then fails."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        lora: Mapping[str, object] | None = None,
        device: str = "cpu",
        max_model_length: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Take ownership of the model.

        Args:
            lora: arguments of `peft.LoraConfig` (such as `{"r": 16}`); if given, only the adapters are trained.
            max_model_length: maximum of `context_length`.
            seed: seed of the first weights of adapters, and of the order of the mini-batches.
            options: see `Optimizer`.
        """
        self._whole: Callable[[], PreTrainedModel] | None = None  # the model with untrained adapters, without 4 bits
        adapted = model if lora is None else with_lora(model, lora, seed)
        cast("torch.nn.Module", adapted).to(device).eval()  # transformers wraps `to` and loses its types
        super().__init__(adapted, tokenizer, max_model_length=max_model_length)
        pad, end = tokenizer.pad_token_id, cast("int", tokenizer.eos_token_id)
        self._optimizer = Optimizer(self.model, end if pad is None else cast("int", pad), seed=seed, **options)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        bf16: bool = False,
        device: str = "cpu",
        four_bit: str | None = None,
        model: PreTrainedModel | None = None,
        **settings: Any,
    ) -> Policy:
        """Load model and tokenizer from a folder (or a name in the local cache); `settings` as for the constructor.

        `bf16`: the model computes in bfloat16, and its trained weights have float32 copies (see `parameters.py`).
        `four_bit`: see `load_model`; requires `lora`.
        `model` is the result of an earlier `load_model` of the same path.
        """
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if model is None:
            model = load_model(path, bf16=bf16, device=device, four_bit=four_bit)
        policy = cls(model, tokenizer, device=device, **settings)
        if four_bit is not None:
            policy._whole = lambda: with_lora(load_model(path, bf16=bf16), settings["lora"], 0)
        return policy

    @override
    def merged(self) -> PreTrainedModel:
        """Return the model, or a copy with the adapters merged in. If it was loaded in 4 bits, the copy has the weights
        of before, because adding to 4 bits would round the adapters away."""
        if self._whole is None:
            return super().merged()
        whole: Any = self._whole()
        with torch.no_grad():
            for name, weight in self.state().weights.items():
                if not name.startswith(PREFIX):
                    whole.get_parameter(name).copy_(weight)
        return whole.merge_and_unload()

    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Tensor:
        """Return the natural log-probability of each masked token given all previous ones, 0 elsewhere: (B, T)."""
        return score(self.model, batch, temperature, packed=False)[0]

    def update(
        self,
        samples: Sequence[Sample],
        advantages: Sequence[float | Sequence[float]],
        settings: UpdateSettings | None = None,
    ) -> UpdateResult:
        """Train on the rows; return the metrics of the update and the values of each row in the loss.

        Each of the `num_iterations` passes goes over the rollouts in a new order and makes one optimizer step per
        `minibatch_rollouts` of them (None: all together); the rows of a rollout stay together. A step whose loss or
        gradient is not finite is skipped and counted. A step that runs out of memory is repeated from the same weights
        with fewer rows per forward pass; the notes of the result report it.

        The same rows, in any order, on the same state give the same weights, on a CPU bit for bit (see `update.py`).

        Args:
            advantages: (B,) the advantage of each row's rollout, or those of its model calls.

        Returns:
            `figures` has the means over the steps of `loss`, `clip_fraction`, `approx_kl`, `entropy` (nats),
            `grad_norm` (before clipping) and `padding_share` (the share of padding in the tokens of the forward
            passes), NaN if every step was skipped; `first_ratio_error`, the largest distance of
            a ratio from one before the first step; `first_stale_kl`, the divergence per stale token of the weights that
            sampled stale tokens; `update_kl`, the divergence after the last step from the weights before the update;
            and the counts `steps`, `skipped_steps`, `rows`, `rollouts`, `tokens`.

        Raises:
            ValueError: A row is malformed (see `make_batch`).
            OutOfMemoryError: A single row does not fit into the memory.
        """
        with self.lock, one_thread() if self.is_small else nullcontext():
            steps_before = self._optimizer.steps_taken
            try:
                return self._optimizer.update(samples, advantages, settings or UpdateSettings())
            finally:  # also if a later mini-batch fails: the weights of the previous version no longer exist
                self.weight_version += self._optimizer.steps_taken > steps_before
                if not self.is_small:
                    return_freed_memory()

    def divergences(self, samples: Sequence[Sample], settings: UpdateSettings) -> list[float]:
        """Return the divergence of each row from the model as loaded, in nats, for a penalty in the reward: (B,)"""
        with self.lock, one_thread() if self.is_small else nullcontext():
            return self._optimizer.divergences(samples, settings)

    def state(self) -> PolicyState:
        """Return the state that later updates depend on. Its tensors are live: hold `lock` until they are written."""
        learner = self._optimizer
        learner.prepare_optimizer()
        weights = {name: weight.detach() for name, weight in learner.learned.items()}
        return PolicyState(
            weights,
            learner.settings.optim,
            state_of(learner.optimizers, learner.learned),
            learner.random.getstate(),
            self.weight_version,
            learner.micro_batches.max_tokens,
            learner.steps_taken,
            {} if learner.reference is None else learner.reference.weights,
        )

    def restore(self, state: PolicyState) -> None:
        """Restore a state of a policy with the same model and adapters.

        Raises:
            ValueError: the state belongs to another model, other adapters or another optimizer; nothing changes.
        """
        learner = self._optimizer
        with self.lock, torch.no_grad():
            own = self.state()
            if state.optim != own.optim:
                raise ValueError(f"The state is that of optim={state.optim!r}, but this policy has optim={own.optim!r}")
            live, saved = _shapes(own), _shapes(state)
            if not own.optimizer or not state.optimizer:  # one is before the first step
                live, saved = ({name: of[name] for name in of if "/" not in name} for of in (live, saved))
            for name in sorted(live.keys() | saved.keys()):
                if name not in live or live[name] != saved.get(name):
                    raise ValueError(
                        "The state belongs to another model or other adapters: "
                        f"{name} has the shape {live.get(name)} here and {saved.get(name)} in the state"
                    )
            if own.reference.keys() != state.reference.keys():
                kinds = [("a" if one.reference else "no") + " moving reference" for one in (state, own)]
                raise ValueError(f"The state has {kinds[0]}, but this policy has {kinds[1]} (sync_ref_model)")
            for name, weight in own.weights.items():
                weight.copy_(state.weights[name])
            for name, weight in own.reference.items():
                weight.copy_(state.reference[name])
            if learner.reference is not None:
                learner.reference.publish()
            learner.steps_taken = state.steps_taken
            restore_state(learner.optimizers, learner.learned, state.optimizer)
            learner.weights.publish()
            version, numbers, gauss = cast("Any", state.random)
            learner.random.setstate((version, tuple(numbers), gauss))  # JSON has made lists of tuples
            learner.micro_batches.max_tokens = state.max_tokens_per_forward
            self.weight_version = state.weight_version


def _shapes(state: PolicyState) -> dict[str, tuple[int, ...]]:
    tensors = state.weights | state.optimizer  # no name is in both
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
