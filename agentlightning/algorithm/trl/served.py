"""The model that TRL trains, as the engine and the records of a run see it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from agentlightning.algorithm.grpo.learner.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
        self.tokenizer = tokenizer
        self.weight_version = weight_version
        self.lock = threading.RLock()
        self._max_length = None
