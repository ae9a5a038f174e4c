"""The model that TRL trains, as the engine and the records of a run see it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentlightning.engine.torch_setup import leave_out_cudnn_attention, one_thread
from agentlightning.training.batch import make_batch
from agentlightning.training.learner.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from agentlightning.adapter.rows.samples import Sample


class ServedModel(Policy):
    """A policy whose weights another trainer changes: it can be served, saved and compared, and has no optimizer."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, weight_version: int) -> None:
        """Take a model that is in evaluation mode whenever it is served.

        Raises:
            ValueError: the tokenizer has no chat template or no end-of-sequence token.
        """
        if not tokenizer.chat_template or tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path or 'the policy'} needs a chat template (to render messages) "
                "and an end-of-sequence token (to know when a reply is over)"
            )
        self.model = model
        leave_out_cudnn_attention(model.device)
        self.tokenizer = tokenizer
        self.weight_version = weight_version
        self.lock = threading.RLock()
        self._max_length = None

    def logprobs_of(self, samples: Sequence[Sample], temperature: float) -> Tensor:
        """Return the natural log-probability of each trained token, row after row: (N,)."""
        with torch.no_grad(), one_thread() if self.is_small else nullcontext():
            rows = (make_batch([sample], [0.0], device=self.model.device) for sample in samples)
            logprobs = [self.logprobs(row, temperature=temperature)[row.mask] for row in rows]
            return torch.cat(logprobs) if logprobs else torch.zeros(0)


def engine_logprobs(samples: Sequence[Sample]) -> Tensor:
    """Return what the engine gave for each of these tokens when it sampled them: (N,)."""
    return torch.tensor(
        [
            logprob
            for sample in samples
            for logprob, trained in zip(sample.logprobs, sample.mask, strict=True)
            if trained
        ]
    )
