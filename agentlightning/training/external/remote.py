"""A model that another system (VERL, Tinker) trains and serves, with the interface of a run's own policy."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from typing_extensions import override

from agentlightning.engine.engine import ONLY_POLICY
from agentlightning.engine.policy_engine import EngineStats
from agentlightning.engine.served import ServedModel
from agentlightning.engine.service import ServedAs
from agentlightning.errors import BadRequestError
from agentlightning.training.settings import TrainingSettings
from agentlightning.training.updater import Learner, Updater


class RemotePolicy(ServedModel):
    """A policy that has only its tokenizer in this process."""

    def __init__(self, path: str, longest: int, setting: str) -> None:
        """Read the tokenizer and the settings of a model.

        Args:
            longest: maximum number of tokens that its server accepts.
            setting: the name of the setting that holds `path`, for error messages.

        Raises:
            BadRequestError: there is no such model, or it has no chat template or no end-of-sequence token.
        """
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            self.config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise BadRequestError(f"{setting}={path!r} is not a model: {error}") from None
        if not self.tokenizer.chat_template or self.tokenizer.eos_token_id is None:
            raise BadRequestError(f"the tokenizer of {path!r} needs a chat template and an end-of-sequence token")
        try:
            configured: Any = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:
            configured = None
        several = configured if isinstance(configured, list) else [configured]
        self._eos_ids = frozenset(token for token in (self.tokenizer.eos_token_id, *several) if token is not None)
        self._longest = longest
        self.weight_version = 0
        self.lock = threading.RLock()

    @property
    @override
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    @property
    @override
    def context_length(self) -> int:
        return min(self._longest, getattr(self.config, "max_position_embeddings", None) or self._longest)

    @property
    @override
    def is_small(self) -> bool:
        return False

    @override
    def gives_probabilities(self) -> bool:
        return True

    def served_as(self, settings: TrainingSettings, algorithm: str) -> ServedAs:
        """Return the model as its endpoints serve it."""
        return ServedAs(
            model_name=ONLY_POLICY,
            eos_ids=self.eos_ids,
            vocabulary=int(self.config.vocab_size),
            context_length=self.context_length,
            max_new_tokens=settings.max_completion_length,
            seed=settings.seed,
            by=algorithm,
        )


class RemoteEngine:
    """One endpoint of the model; its session starts and ends it."""

    model_name = ONLY_POLICY

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url, self.api_key = base_url, api_key

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    @contextmanager
    def paused(self, timeout: float = 30.0) -> Generator[None]:
        """Return the block in which the weights may change."""
        yield

    def stats(self) -> EngineStats:
        """Return empty totals: the other system measures them."""
        return EngineStats()


class RemoteUpdater(Updater):
    """A model that another system trains and serves, as the only policy of a run."""

    def __init__(self, policy: RemotePolicy, settings: TrainingSettings, engine: RemoteEngine, *, name: str) -> None:
        """Use the first endpoint; its name is unique to this start of the run."""
        super().__init__([Learner(None, settings, policy)], [engine])
        self._name = name

    @override
    def digest(self) -> str:
        # the weights are on another system: those of another start never count as the same
        return f"{self._name}-{self.weight_version}"
