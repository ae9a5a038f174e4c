"""APO: find better prompts. A model criticises rollouts of a prompt, edits it by the critique, and validation decides.

The algorithm as the Trainer sees it: settings, override points, and the parts of a search put together. The search is
in `search.py`, choice in `choosing.py`, the best in `leading.py`, the model calls in `critic.py`.
"""

from __future__ import annotations

import copy
import functools
import logging
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from typing_extensions import override

from agentlightning.algorithm.prompt_algorithm import PromptSearch
from agentlightning.algorithm.utils import with_llm_proxy
from agentlightning.chat.bill import Limits
from agentlightning.chat.chat import Chat
from agentlightning.errors import BadRequestError
from agentlightning.prompt_search.apo.critic import Branch, Critic, present
from agentlightning.prompt_search.apo.prompt_files import APPLY_EDIT_FILES, GRADIENT_FILES, check_files
from agentlightning.prompt_search.apo.search import BeamSearch
from agentlightning.prompt_search.apo.steps import SearchSettings
from agentlightning.prompt_search.asking import asking
from agentlightning.prompt_search.cases import RolloutResult
from agentlightning.prompt_search.history import History, PromptVersion
from agentlightning.prompt_search.playing import PromptPlayer, read_published
from agentlightning.prompt_search.result import PromptResult
from agentlightning.prompt_search.scores import MissingPolicy, check_missing, score_of
from agentlightning.prompt_search.seeds import items_of, seed_templates
from agentlightning.terminal import cut
from agentlightning.types import Dataset, PromptTemplate, RolloutMode
from agentlightning.utils.id import generate_id

if TYPE_CHECKING:
    from agentlightning.llm_proxy import LLMProxy

logger = logging.getLogger("agentlightning.algorithm.apo")
T = TypeVar("T")


class _Default(str):
    """The name of a model that is asked unless the server brings a name of its own."""


_GRADIENT_MODEL, _EDIT_MODEL = _Default("gpt-5-mini"), _Default("gpt-4.1-mini")


class APO(PromptSearch, Generic[T]):
    """Search for better versions of the prompt templates among the initial resources.

    Beam search: each round runs the agent with every prompt of the beam on training tasks, a model criticises the
    rollouts, a model edits the prompt by the critique, and the new versions are compared with the beam on validation
    tasks. The agent is not changed; all other resources stay as they are. Returns a `PromptResult`.

    Subclasses may override `evaluate_prompt_on_batch`, `get_rollout_results`, `compute_textual_gradient` and
    `textual_gradient_and_apply_edit`: the search and the other three call the override.

    Args:
        async_openai_client: who is asked for critiques and edits: a client with `chat.completions.create` (async or
            sync), an `agl.LLM`, an `agl.Chat`, or a callable `(messages, **settings)`. None is the server that
            `OPENAI_API_KEY` and `OPENAI_BASE_URL` name, else the Trainer's `llm_proxy`.
        gradient_model: writes critiques. With an `LLM` or the gateway the default is their own model.
        apply_edit_model: rewrites the prompt; the same.
        diversity_temperature: of both calls; None leaves it to the server.
        gradient_batch_size: tasks per training batch, and rollouts that are shown to the critic.
        val_batch_size: validation tasks per choice.
        beam_width: prompts that are kept, and parents that are expanded, per round.
        branch_factor: new versions per parent.
        beam_rounds: rounds.
        rollout_batch_timeout: seconds for the rollouts of one prompt on one batch; those that are late are cancelled.
        run_initial_validation: whether the seed is evaluated on the whole validation set first.
        gradient_prompt_files: prompts of the critic, one drawn per critique; see `prompt_files.py`. None are ours.
        apply_edit_prompt_files: those of the editor.
        templates: names of the templates to search, edited in turns, one per round. None is all of them.
        limits: on the calls to critic and editor, see `agl.Limits`; the search then ends with what it has.
        prices: by model, `(prompt, completion)` of a million tokens each; for the cost in the bill.
        concurrency: calls at the same time.
        retries: of a call that failed and may succeed.
        missing: what happens to a task whose rollout has no reward: see `MissingPolicy`.
        minimum_coverage: share of the tasks that must have earned something for a prompt to be chosen.
        halving: whether the worse half of the candidates is dropped before the whole batch is run.
        final_candidates: further members of beams that are evaluated on the whole validation set before the best is
            chosen, as the leader of each round was: those with the greatest lower bounds. 0 evaluates none.
        seed: of everything that is drawn; an equal one draws the same.
        output_dir: folder for `history.json`, written after each round; None writes none.

    Raises:
        BadRequestError, TypeError: a setting is out of its range; names it.
    """

    def __init__(
        self,
        async_openai_client: object = None,
        *,
        gradient_model: str = _GRADIENT_MODEL,
        apply_edit_model: str = _EDIT_MODEL,
        diversity_temperature: float | None = 1.0,
        gradient_batch_size: int = 4,
        val_batch_size: int = 16,
        beam_width: int = 4,
        branch_factor: int = 4,
        beam_rounds: int = 3,
        rollout_batch_timeout: float = 3600.0,
        run_initial_validation: bool = True,
        gradient_prompt_files: Sequence[str | Path] | None = None,
        apply_edit_prompt_files: Sequence[str | Path] | None = None,
        templates: Sequence[str] | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        prices: Mapping[str, Sequence[float]] | None = None,
        concurrency: int = 4,
        retries: int = 3,
        missing: MissingPolicy = "retry",
        minimum_coverage: float = 0.5,
        halving: bool = True,
        final_candidates: int = 2,
        seed: int = 0,
        output_dir: str | Path | None = None,
        _poml_trace: bool = False,
    ) -> None:
        self.async_openai_client = async_openai_client
        self.gradient_model, self.apply_edit_model = gradient_model, apply_edit_model
        self.diversity_temperature = diversity_temperature
        self.gradient_batch_size, self.val_batch_size = gradient_batch_size, val_batch_size
        self.beam_width, self.branch_factor, self.beam_rounds = beam_width, branch_factor, beam_rounds
        self.rollout_batch_timeout = rollout_batch_timeout
        self.run_initial_validation = run_initial_validation
        self.gradient_prompt_files = check_files("gradient_prompt_files", gradient_prompt_files, GRADIENT_FILES)
        self.apply_edit_prompt_files = check_files("apply_edit_prompt_files", apply_edit_prompt_files, APPLY_EDIT_FILES)
        self.templates = None if templates is None else tuple(templates)
        self.limits, self.prices = Limits.of(limits), dict(prices or {})
        self.concurrency, self.retries = concurrency, retries
        self.missing: MissingPolicy = missing
        self.minimum_coverage, self.halving, self.seed = minimum_coverage, halving, seed
        self.final_candidates = final_candidates
        self.output_dir = None if output_dir is None else Path(output_dir)
        self._poml_trace = _poml_trace
        counts = ("gradient_batch_size", "val_batch_size", "beam_width", "branch_factor", "beam_rounds")
        for name, least in (*((name, 1) for name in counts), ("final_candidates", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadRequestError(f"{name} must be a whole number of {least} or more; got {value!r}")
        if not rollout_batch_timeout > 0:
            raise BadRequestError(f"rollout_batch_timeout must be above 0 seconds; got {rollout_batch_timeout!r}")
        check_missing(missing, minimum_coverage)
        if isinstance(async_openai_client, Chat) and (self.prices or self.limits != Limits()):
            raise BadRequestError("limits and prices would have no effect beside an agl.Chat: give them to the Chat")
        self._chat = self._make_chat(None)
        self._player: PromptPlayer | None = None

    @override
    def with_iterations(self, max_iterations: int) -> Self:
        """Return a copy that makes so many new versions at most."""
        twin = copy.copy(self)
        twin.beam_width = min(self.beam_width, max_iterations)
        twin.branch_factor = max(1, min(self.branch_factor, max_iterations // twin.beam_width))
        twin.beam_rounds = max_iterations // (twin.beam_width * twin.branch_factor)
        return twin

    # --- what it works on ------------------------------------------------------------------------------------------

    def get_seed_prompt_template(self) -> tuple[str, PromptTemplate]:
        """Return the first prompt template of the initial resources, with its name.

        Raises:
            ValueError: there are no initial resources, or no prompt template among them.
        """
        return next(iter(self._seeds().items()))

    def _seeds(self) -> dict[str, PromptTemplate]:
        return seed_templates(self.get_initial_resources(), self.templates)

    # --- a run -----------------------------------------------------------------------------------------------------

    @override
    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> PromptResult:
        """Search, and return the best prompts with every version on the way.

        A run that is stopped, or reaches a limit, keeps the best so far in `result`.

        Raises:
            ValueError: a dataset or a prompt template is missing, or there is nobody to ask.
            NoCandidateError: no rollout of any version earned anything.
            ChatError: critic or editor answered no call of the first round.
        """
        train, val = items_of("APO", "train_dataset", train_dataset), items_of("APO", "val_dataset", val_dataset)
        self._seeds()
        return await self._run(train, val)

    @with_llm_proxy()
    async def _run(self, llm_proxy: LLMProxy | None, train: list[Any], val: list[Any]) -> PromptResult:
        began, seeds, log = time.monotonic(), self._seeds(), self.get_run_log()
        models = {
            str(model) for model in (self.gradient_model, self.apply_edit_model) if not isinstance(model, _Default)
        }
        async with asking(
            self._make_chat,
            self.get_store(),
            llm_proxy,
            models=models,
            purpose="critic and editor",
            say="APO(gradient_model=..., apply_edit_model=...), or give APO a client of its own",
        ) as chat:
            self._chat = chat
            critic = self._critic(chat)
            if chat.limits.cost is not None:
                chat.check_prices(*map(chat.model_asked, (critic.gradient_model, critic.apply_edit_model)))
            history = History(log, self.output_dir)
            seed = PromptVersion("v0", seeds, next(iter(seeds)), state="kept")
            published = functools.partial(read_published, self.get_store(), "apo", log.run_id)
            chat.start(await history.open(seed, published), run=log.run_id)
            self._player = PromptPlayer(
                self.get_store(),
                self.get_rollout_results,
                prefix="apo",
                run=log.run_id or generate_id(12),
                resources=self.get_initial_resources() or {},
                timeout_seconds=self.rollout_batch_timeout,
                config=self.get_rollout_config(),
                missing=self.missing,
                seconds_left=chat.seconds_left,
            )
            names = SearchSettings.__dataclass_fields__
            search = BeamSearch(
                steps=self,
                settings=SearchSettings(**{name: getattr(self, name) for name in names}),
                player=self._player,
                critic=critic,
                history=history,
                log=log,
                seed=seed,
                names=list(seeds),
                train=train,
                val=val,
            )
            try:
                await search.run()
            finally:
                self.result = result = PromptResult(
                    best=search.leaders.best,
                    history=list(history.versions),
                    best_resources=self._player.resources_with(search.leaders.best.templates),
                    bill=chat.bill,
                    rollouts=self._player.rollouts,
                    stop_reason=search.stop_reason,
                    p_value=search.leaders.p_value,
                    seconds=time.monotonic() - began,
                )
                history.write(
                    best=search.leaders.best.version, bill=chat.bill.as_json(), stop_reason=search.stop_reason
                )
                self._player = None  # a part of this run
            logger.info("%s", result)
            return result

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
        """Return the results of a prompt on tasks, in their order, and its mean reward; None if nothing earned one.

        Calls made at the same time run as one round. What ran before does not run again; such results of the mode `val`
        hold no messages.
        """
        assert self._player is not None, "evaluate_prompt_on_batch belongs to a run"
        prefix = prefix or f"[Prompt {prompt.version}]"
        text = cut(prompt.templates[resource_name].template, 50)
        logger.info("%s plays %d tasks (%s): %r", prefix, len(dataset), mode, text)
        results = await self._player.play(prompt.version, prompt.templates, dataset, mode)
        score = score_of(results, self.missing)
        statuses = [result["status"] for result in results]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        rewards = ", ".join("-" if (r := result["final_reward"]) is None else f"{r:g}" for result in results)
        mean = "-" if score.mean is None else f"{score.mean:.3f}"
        logger.info("%s %s; rewards %s; mean %s", prefix, counts, rewards, mean)
        return results, score.mean

    async def compute_textual_gradient(
        self, prompt: PromptVersion, results: Sequence[RolloutResult], *, prefix: str | None = None
    ) -> str | None:
        """Return what the critic says of a prompt after some of its worst and best results; None for nothing."""
        branch, prefix = present.get() or Branch(random.Random(self.seed)), prefix or f"[Prompt {prompt.version}]"
        if len(results) < self.gradient_batch_size:
            logger.warning("%s the critic sees all %d results: fewer than gradient_batch_size", prefix, len(results))
        critic = self._critic(self._chat)
        file, critique = await critic.critique(prompt.prompt_template, results, self.gradient_batch_size, branch)
        logger.info("%s critique by %s with %s:\n%s", prefix, critic.gradient_model, file.name, critique)
        return critique or None

    async def textual_gradient_and_apply_edit(
        self, prompt: PromptVersion, results: Sequence[RolloutResult], *, prefix: str | None = None
    ) -> str | None:
        """Return the text of a new version: the edit by a critique of `results`. None if either gives nothing."""
        branch, prefix = present.get() or Branch(random.Random(self.seed)), prefix or f"[Prompt {prompt.version}]"
        critique = await self.compute_textual_gradient(prompt, results, prefix=prefix)
        if not critique:
            logger.error("%s there is no critique, and so no new version", prefix)
            return None
        branch.critique = critique
        critic = self._critic(self._chat)
        file, text = await critic.edit(prompt.prompt_template, critique, branch)
        logger.info("%s edited by %s with %s", prefix, critic.apply_edit_model, file.name)
        return text

    # --- who is asked ------------------------------------------------------------------------------------------------

    def _critic(self, chat: Chat) -> Critic:
        own = chat.model or (None if chat.source is None else chat.source.model)

        def asked(model: str) -> str:
            return own or str(model) if isinstance(model, _Default) else model

        return Critic(
            chat,
            asked(self.gradient_model),
            asked(self.apply_edit_model),
            self.diversity_temperature,
            self.gradient_prompt_files,
            self.apply_edit_prompt_files,
            self._poml_trace,
        )

    def _make_chat(self, source: object) -> Chat:
        client = self.async_openai_client
        if isinstance(client, Chat):
            return client if source is None else client.at(source)
        settings: dict[str, Any] = {"limits": self.limits, "prices": self.prices}
        return Chat(
            client if source is None else source, concurrency=self.concurrency, retries=self.retries, **settings
        )
