"""A model that another system trains and serves (VERL, Tinker), as the parts of a run see it from outside."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from typing_extensions import override

from agentlightning.engine.engine import ONLY_POLICY
from agentlightning.engine.policy_engine import EngineStats
from agentlightning.errors import BadRequestError
from agentlightning.training.learner.policy import Policy
from agentlightning.training.policies.learners import Learner, Learners


class RemoteSession(Protocol):
    """The connection to the system that holds the weights.

    Attributes:
        name: no other start of any run has it.
        token: what its endpoints ask for.
    """

    name: str
    token: str

    def save_model(self, folder: Path) -> object:
        """Write the model, or where it is, into a folder."""
        ...


class RemotePolicy(Policy):
    """A policy of which only the tokenizer is here."""

    def __init__(self, path: str, longest: int, setting: str) -> None:
        """Read the tokenizer and the settings of a model.

        Args:
            longest: tokens that its server takes.
            setting: the name of the setting that holds `path`, for error messages.

        Raises:
            BadRequestError: there is no such model, or it has no chat template or no end-of-sequence token.
        """
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            self.config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise BadRequestError(f"{setting}={path!r} is no model: {error}") from None
        if not self.tokenizer.chat_template or self.tokenizer.eos_token_id is None:
            raise BadRequestError(
                f"the tokenizer of {path!r} needs a chat template (to render messages) and an end-of-sequence token "
                "(to know when a reply is over)"
            )
        try:
            ends: Any = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:
            ends = None
        several = ends if isinstance(ends, list) else [ends]
        self._ends = frozenset(one for one in (self.tokenizer.eos_token_id, *several) if one is not None)
        self._longest = longest
        self.weight_version = 0
        self.lock = threading.RLock()

    @property
    @override
    def eos_ids(self) -> frozenset[int]:
        return self._ends

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


class RemoteEngine:
    """One of the endpoints at which the model answers."""

    model_name = ONLY_POLICY

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url, self.api_key = base_url, api_key

    def start(self) -> None:
        """Do nothing: its session starts it."""

    def stop(self) -> None:
        """Do nothing: its session ends it."""

    @contextmanager
    def swap(self, timeout: float = 30.0) -> Generator[None]:
        """Return the block in which the weights may change: its session sees to it."""
        yield

    def stats(self) -> EngineStats:
        """Return nothing: it is measured elsewhere."""
        return EngineStats()


class RemoteLearners(Learners):
    """The model as the only policy of a run."""

    def __init__(self, learner: Learner, session: RemoteSession) -> None:
        super().__init__([learner])
        self._session = session

    def serve_at(self, address: str) -> None:
        """Begin with this endpoint."""
        self.engines = (RemoteEngine(address, self._session.token),)

    @override
    def digest(self) -> str:
        # the weights lie elsewhere: those of another start never count as the same
        return f"{self._session.name}-{self.weight_version}"

    @override
    def save(self, folder: Path) -> None:
        self._session.save_model(folder)
