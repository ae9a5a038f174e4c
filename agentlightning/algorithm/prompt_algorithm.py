"""`PromptSearch`: the common settings, run and result of algorithms that search over prompts."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from typing_extensions import override

from agentlightning.adapter.messages import TraceToMessages
from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.utils import running_llm_proxy
from agentlightning.chat.bill import Limits
from agentlightning.chat.chat import Chat
from agentlightning.errors import BadRequestError
from agentlightning.prompt_search.evaluator import CandidateEvaluator
from agentlightning.prompt_search.history import History, PromptResult, PromptVersion
from agentlightning.prompt_search.results import MissingPolicy, RolloutResult, read_results
from agentlightning.prompt_search.search import SearchState, open_chat
from agentlightning.training.tasks import items_of
from agentlightning.types import Dataset, PromptTemplate, Rollout
from agentlightning.utils.id import generate_id

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(kw_only=True, eq=False, repr=False)
class SearchSettings:
    """The settings of every search over prompts."""

    templates: Sequence[str] | None = None
    """Names of the templates to search. None searches all templates."""
    rollout_batch_timeout: float = 3600.0
    """Time limit in seconds for the rollouts of one prompt on one batch; late rollouts are cancelled."""
    missing: MissingPolicy = "retry"
    """Handling of a task whose rollout has no reward: `retry` runs it once more and then excludes it, `skip` excludes
    it immediately, `zero` (not for GEPA) counts it as 0."""
    minimum_coverage: float = 0.5
    """Minimum share of tasks with a reward, between 0 and 1, for a prompt to be chosen."""
    limits: Limits | Mapping[str, Any] | None = None
    """Limits on the model calls of the search, see `agl.Limits`. At a limit the search ends with the best prompt so
    far; at the limit of seconds, running rollouts are cancelled."""
    prices: Mapping[str, Sequence[float]] | None = None
    """Prices by model, as `(prompt, completion)` per million tokens, to compute the cost of the search."""
    concurrency: int = 4
    """Maximum number of concurrent model calls."""
    retries: int = 3
    """Number of retries of a model call with a temporary error."""
    seed: int = 0
    """Seed of all random choices; the same seed gives the same choices."""

    def __post_init__(self) -> None:
        self.templates = None if self.templates is None else tuple(self.templates)
        self.limits, self.prices = Limits.of(self.limits), dict(self.prices or {})
        if not self.rollout_batch_timeout > 0:
            raise BadRequestError(f"rollout_batch_timeout must be above 0 seconds; got {self.rollout_batch_timeout!r}")
        policies, share = get_args(MissingPolicy), self.minimum_coverage
        if self.missing not in policies:
            raise BadRequestError(f"missing must be one of {', '.join(policies)}; got {self.missing!r}")
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:  # pyright: ignore[reportUnnecessaryIsInstance] -- of the user's
            raise BadRequestError(f"minimum_coverage must be a number from 0 to 1; got {share!r}")

    def _check_whole_number(self, name: str, least: int = 1) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadRequestError(f"{name} must be a whole number of {least} or more; got {value!r}")


class PromptSearch(SearchSettings, Algorithm[PromptResult]):
    """A search over prompts. Its result is available even if it is interrupted."""

    _name: ClassVar[str]
    """Name used in the ids of resources and for the logger."""
    _purpose: ClassVar[str]
    """Input of the rollout of the model calls."""
    _model_setting: ClassVar[str]
    """The argument that names a model, for an error message."""
    result: PromptResult | None = None
    """Result of the last run, even if it was interrupted; None before the first."""
    _state: SearchState | None = None
    """State of the current run."""

    def get_best_prompt(self) -> PromptTemplate:
        """Return the best prompt so far; with several templates, the one that the best version changed last.

        Raises:
            ValueError: no search has run.
        """
        if self.result is None:
            raise ValueError(
                "No best prompt found: call Trainer.fit first. If the search ran in a separate process, use "
                "trainer.result.best_prompt"
            )
        return self.result.best_prompt

    @override
    def get_adapter(self) -> TraceToMessages:
        """Return the adapter that returns messages: the Trainer's if it returns messages, otherwise a default one."""
        return self._adapter if isinstance(self._adapter, TraceToMessages) else TraceToMessages()

    async def get_rollout_results(self, rollouts: Sequence[Rollout]) -> list[RolloutResult]:
        """Return status, reward, failure, task, messages and spans of each ended rollout, from its latest attempt."""
        return await read_results(self.get_store(), rollouts, self.get_adapter())

    @override
    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> PromptResult:
        """Search, and return the best prompts and every version.

        A run that is stopped or reaches a limit keeps the best prompt so far in `result`.

        Raises:
            ValueError: a dataset or a prompt template is missing.
            BadRequestError: no model is configured, or GEPA's `run_dir` has a search of other prompts or tasks.
            NoCandidateError: no rollout of the initial prompt, or of any version, has a reward.
            ChatError: all calls of the model failed (with APO: all calls of the first round).
        """
        train, val = items_of(train_dataset), items_of(val_dataset)
        for name, items in (("train_dataset", train), ("val_dataset", val)):
            if not items:
                raise ValueError(
                    f"{name} is required: {self._name.upper()} learns from train_dataset and selects on val_dataset"
                )
        store, log, seeds, models = self.get_store(), self.get_run_log(), self._seeds(), self._models()
        run = log.run_id or generate_id(12)
        async with (
            running_llm_proxy(self) as llm_proxy,
            open_chat(
                self._make_chat, store, llm_proxy, models=models, purpose=self._purpose, setting=self._model_setting
            ) as chat,
        ):
            self._check_prices(chat)
            seed = PromptVersion("v0", seeds, next(iter(seeds)), state="kept")
            history = History(
                log, self._folder(), lambda version: store.get_resources_by_id(f"{self._name}-{run}-{version}")
            )
            chat.start(await history.open(seed), run=log.run_id)
            evaluator = CandidateEvaluator(
                store,
                self.get_rollout_results,
                name=self._name,
                run=run,
                resources=self.get_initial_resources() or {},
                timeout_seconds=self.rollout_batch_timeout,
                config=self.get_rollout_config(),
                missing=self.missing,
                seconds_left=chat.seconds_left,
            )
            state = SearchState(
                chat, history, evaluator, log, seed, train, val, self.missing, self.minimum_coverage, best=seed
            )
            search = await self._prepare(state)
            try:
                self._state = state
                await search()
            finally:
                self.result, self._state = state.result(), None
                state.write_history(stop_reason=state.stop_reason)
            logging.getLogger(f"agentlightning.algorithm.{self._name}").info("%s", self.result)
            return self.result

    def _seeds(self) -> dict[str, PromptTemplate]:
        resources, templates = self.get_initial_resources(), self.templates
        if resources is None:
            raise ValueError("initial_resources is not set: pass the Trainer initial_resources={'prompt': template}")
        seeds = {name: each for name, each in resources.items() if isinstance(each, PromptTemplate)}
        if not seeds:
            names = ", ".join(resources) or "nothing"
            raise ValueError(
                f"No prompt template found in initial_resources, which has {names}: add one such as "
                "agl.PromptTemplate(template='...', engine='f-string')"
            )
        if templates is None:
            return seeds
        if not templates or any(name not in seeds for name in templates):
            raise BadRequestError(f"templates={list(templates)} must name some of the templates {', '.join(seeds)}")
        return {name: seeds[name] for name in templates}

    def _make_chat(self, source: object) -> Chat:
        """Return the chat of the program; with a source, the same chat that calls the source."""
        own, model = self._chat_source()
        if isinstance(own, Chat):
            if self.prices or self.limits != Limits():
                raise BadRequestError("limits and prices have no effect with an agl.Chat: pass them to the Chat")
            return own if source is None else own.at(source)
        settings: dict[str, Any] = {"limits": self.limits, "prices": self.prices}
        return Chat(source or own, model=model, concurrency=self.concurrency, retries=self.retries, **settings)

    # --- of the algorithm ------------------------------------------------------------------------------------------

    def _chat_source(self) -> tuple[object, str | None]:
        """Return the source of the chat, and its model for calls that name none."""
        raise NotImplementedError

    def _models(self) -> list[str]:
        """Return the models that the program names."""
        _, model = self._chat_source()
        return [] if model is None else [model]

    def _check_prices(self, chat: Chat) -> None:
        raise NotImplementedError

    def _folder(self) -> Path | None:
        """Return the folder of `history.json`."""
        raise NotImplementedError

    async def _prepare(self, state: SearchState) -> Callable[[], Awaitable[None]]:
        """Return the function that runs the search."""
        raise NotImplementedError
