"""APO: search for better prompts with critiques and edits by a model, and compare them on validation tasks.

This module has the settings and override points of the algorithm. The search is in `prompt_search/beam_search.py`, the
model calls in `prompt_search/critic.py`.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Self

from typing_extensions import TypeVar, override

from agentlightning.algorithm.prompt_algorithm import PromptSearch
from agentlightning.base.field_help import explain_fields
from agentlightning.base.terminal import counted, cut
from agentlightning.chat.chat import Chat
from agentlightning.prompt_search.beam_search import BeamSearch
from agentlightning.prompt_search.critic import (
    APPLY_EDIT_FILES,
    GRADIENT_FILES,
    Branch,
    Critic,
    check_files,
    current_branch,
)
from agentlightning.prompt_search.history import PromptVersion
from agentlightning.prompt_search.results import RolloutResult
from agentlightning.prompt_search.search import SearchState
from agentlightning.types import PromptTemplate, RolloutMode

logger = logging.getLogger("agentlightning.algorithm.apo")
T = TypeVar("T", default=Any)


class _Default(str):
    """Name of the model if the server does not name its own."""


@explain_fields
@dataclass(kw_only=True, eq=False, repr=False)
class APO(PromptSearch, Generic[T]):
    """Search for better versions of the prompt templates among the initial resources.

    Beam search. In each round, the agent runs with every prompt of the beam on training tasks, a model critiques the
    rollouts, a model edits the prompt according to the critique, and the new versions are compared with the beam on
    validation tasks. The agent and all other resources do not change. Returns a `PromptResult`.

    `SearchSettings` has the settings of every search over prompts: `templates`, `rollout_batch_timeout`, `missing`,
    `minimum_coverage`, `limits`, `prices`, `concurrency`, `retries` and `seed`.

    Subclasses may override `evaluate_prompt_on_batch`, `get_rollout_results`, `compute_textual_gradient` and
    `textual_gradient_and_apply_edit`: the search and the other three call the override.

    Raises:
        BadRequestError, TypeError: a setting is out of range. The message names it.
    """

    _name: ClassVar = "apo"
    _purpose: ClassVar = "critic and editor"
    _model_setting: ClassVar = "APO(gradient_model=..., apply_edit_model=...), or pass a client to APO"

    async_openai_client: object = field(default=None, kw_only=False)
    """Source of critiques and edits: a client with `chat.completions.create` (async or sync), an `agl.LLM`, an
    `agl.Chat`, or a callable `(messages, **settings)`. None uses the server in `OPENAI_API_KEY` and `OPENAI_BASE_URL`
    or, if they are not set, the Trainer's `llm_proxy`."""
    gradient_model: str = _Default("gpt-5-mini")
    """Model that writes critiques. With an `LLM` or the gateway, the default is its model."""
    apply_edit_model: str = _Default("gpt-4.1-mini")
    """Model that rewrites the prompt. With an `LLM` or the gateway, the default is its model."""
    diversity_temperature: float | None = 1.0
    """Sampling temperature of critiques and edits; None uses the server's default."""
    gradient_batch_size: int = 4
    """Number of tasks per training batch, and of rollouts that the critic sees."""
    val_batch_size: int = 16
    """Number of validation tasks per selection."""
    beam_width: int = 4
    """Number of prompts to keep, and of parents to expand, per round."""
    branch_factor: int = 4
    """Number of new versions per parent."""
    beam_rounds: int = 3
    """Number of rounds of the search."""
    run_initial_validation: bool = True
    """Whether to evaluate the initial prompt on the full validation set first."""
    gradient_prompt_files: Sequence[str | Path] | None = None
    """Prompt files of the critic, one drawn per critique; see `prompt_search/critic.py`. None: built-in files."""
    apply_edit_prompt_files: Sequence[str | Path] | None = None
    """Prompt files of the editor, one drawn per edit. None uses the built-in files."""
    halving: bool = True
    """Whether to drop the worse half of the candidates before the full batch is run."""
    final_candidates: int = 2
    """Number of beam members, in addition to the leader of each round, that are evaluated on the full validation set
    before the best is chosen: those with the highest lower confidence bounds. 0 evaluates none."""
    output_dir: str | Path | None = None
    """Folder for `history.json`, written after each round; None writes no file."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        for name, own in (("gradient_prompt_files", GRADIENT_FILES), ("apply_edit_prompt_files", APPLY_EDIT_FILES)):
            setattr(self, name, check_files(name, getattr(self, name), own))
        self.output_dir = None if self.output_dir is None else Path(self.output_dir)
        for name in ("gradient_batch_size", "val_batch_size", "beam_width", "branch_factor", "beam_rounds"):
            self._check_whole_number(name)
        self._check_whole_number("final_candidates", least=0)
        self._chat = self._make_chat(None)

    @override
    def with_iterations(self, max_iterations: int) -> Self:
        """Return a copy that creates at most this many new versions."""
        twin = copy.copy(self)
        twin.beam_width = min(self.beam_width, max_iterations)
        twin.branch_factor = max(1, min(self.branch_factor, max_iterations // twin.beam_width))
        twin.beam_rounds = max_iterations // (twin.beam_width * twin.branch_factor)
        return twin

    def get_seed_prompt_template(self) -> tuple[str, PromptTemplate]:
        """Return the name and the first prompt template of the initial resources.

        Raises:
            ValueError: there are no initial resources, or no prompt template among them.
        """
        return next(iter(self._seeds().items()))

    # --- override points ---------------------------------------------------------------------------------------------

    async def evaluate_prompt_on_batch(
        self,
        prompt: PromptVersion,
        resource_name: str,
        dataset: Sequence[Any],
        mode: RolloutMode,
        *,
        prefix: str | None = None,
    ) -> tuple[Sequence[RolloutResult], float | None]:
        """Return the results of a prompt on tasks, in their order, and its mean reward; None if no task has a reward.

        Concurrent calls run as one round. Earlier results are reused; those of the mode `val` have no messages.
        """
        assert self._state is not None, "evaluate_prompt_on_batch can only be called during a run"
        prefix = prefix or f"[Prompt {prompt.version}]"
        text = cut(prompt.templates[resource_name].template, 50)
        logger.info("%s running on %s (%s): %r", prefix, counted(len(dataset), "task"), mode, text)
        results = await self._state.evaluator.evaluate(prompt.version, prompt.templates, dataset, mode)
        score = self._state.score(results)
        statuses = [result["status"] for result in results]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        rewards = ", ".join("-" if (r := result["final_reward"]) is None else f"{r:g}" for result in results)
        mean = "-" if score.mean is None else f"{score.mean:.3f}"
        logger.info("%s %s; rewards %s; mean %s", prefix, counts, rewards, mean)
        return results, score.mean

    async def compute_textual_gradient(
        self, prompt: PromptVersion, results: Sequence[RolloutResult], *, prefix: str | None = None
    ) -> str | None:
        """Return the critique of a prompt, based on some of its worst and best results; None if it is empty."""
        branch = current_branch.get() or Branch(random.Random(self.seed))
        prefix = prefix or f"[Prompt {prompt.version}]"
        if len(results) < self.gradient_batch_size:
            logger.warning("%s the critic sees fewer results than gradient_batch_size: %d", prefix, len(results))
        critic = self._critic(self._chat)
        file, critique = await critic.critique(prompt.prompt_template, results, self.gradient_batch_size, branch)
        logger.info("%s critique by %s with %s:\n%s", prefix, critic.gradient_model, file.name, critique)
        return critique or None

    async def textual_gradient_and_apply_edit(
        self, prompt: PromptVersion, results: Sequence[RolloutResult], *, prefix: str | None = None
    ) -> str | None:
        """Return the text of a new version, edited by a critique of `results`. None if critique or edit is empty."""
        branch = current_branch.get() or Branch(random.Random(self.seed))
        prefix = prefix or f"[Prompt {prompt.version}]"
        critique = await self.compute_textual_gradient(prompt, results, prefix=prefix)
        if not critique:
            logger.error("%s the critique is empty; no new version is created", prefix)
            return None
        branch.critique = critique
        critic = self._critic(self._chat)
        file, text = await critic.edit(prompt.prompt_template, critique, branch)
        logger.info("%s edited by %s with %s", prefix, critic.apply_edit_model, file.name)
        return text

    # --- parts of a run ----------------------------------------------------------------------------------------------

    @override
    def _chat_source(self) -> tuple[object, str | None]:
        return self.async_openai_client, None

    @override
    def _models(self) -> list[str]:
        return [model for model in (self.gradient_model, self.apply_edit_model) if not isinstance(model, _Default)]

    @override
    def _check_prices(self, chat: Chat) -> None:
        if chat.limits.cost is not None:
            critic = self._critic(chat)
            chat.check_prices(*map(chat.model_asked, (critic.gradient_model, critic.apply_edit_model)))

    @override
    def _folder(self) -> Path | None:
        return None if self.output_dir is None else Path(self.output_dir)

    @override
    async def _prepare(self, state: SearchState) -> Callable[[], Awaitable[None]]:
        self._chat = state.chat
        return BeamSearch(self, state, self._critic(state.chat)).run

    def _critic(self, chat: Chat) -> Critic:
        own = chat.model or (None if chat.source is None else chat.source.model)
        gradient_model, apply_edit_model = (
            own or str(model) if isinstance(model, _Default) else model
            for model in (self.gradient_model, self.apply_edit_model)
        )
        return Critic(
            chat,
            gradient_model,
            apply_edit_model,
            self.diversity_temperature,
            list(map(Path, self.gradient_prompt_files or ())),
            list(map(Path, self.apply_edit_prompt_files or ())),
        )
