"""`GEPA`: reflective evolution of prompts, by the package `gepa`.

Source: GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning (arXiv:2507.19457). The search is the
package's own; what is ours is the playing of candidates on the store, what the model is shown, who is asked, and the
records.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from typing_extensions import override

from agentlightning.algorithm.prompt_algorithm import PromptSearch
from agentlightning.algorithm.utils import with_llm_proxy
from agentlightning.chat.bill import LimitReached, Limits
from agentlightning.chat.chat import Chat, ChatError
from agentlightning.errors import BadRequestError, MissingExtraError
from agentlightning.private_files import private_folder
from agentlightning.prompt_search.asking import asking
from agentlightning.prompt_search.cases import RolloutResult
from agentlightning.prompt_search.history import History, PromptVersion
from agentlightning.prompt_search.playing import PromptPlayer, read_published
from agentlightning.prompt_search.result import PromptResult
from agentlightning.prompt_search.scores import MissingPolicy, check_missing, sign_test_of
from agentlightning.prompt_search.seeds import items_of, seed_templates
from agentlightning.types import Dataset, PromptTemplate
from agentlightning.utils.id import generate_id

if TYPE_CHECKING:
    from agentlightning.llm_proxy import LLMProxy
    from agentlightning.prompt_search.gepa.adapter import LoopBridge, StoreAdapter
    from agentlightning.prompt_search.gepa.reflection import Reflector

logger = logging.getLogger("agentlightning.algorithm.gepa")
T = TypeVar("T")


class GEPA(PromptSearch, Generic[T]):
    """Search for better versions of the prompt templates among the initial resources, with the package `gepa`.

    In each iteration a candidate of the Pareto front is played on a minibatch of training tasks, a model reflects on
    the rollouts and proposes a new text, and the new candidate is played on the validation tasks if it does better on
    the minibatch. The agent is not changed; all other resources stay as they are. Returns a `PromptResult`.

    A rollout that failed is feedback, and never a score of 0: it is played again, and then left out of the comparison.
    Needs the extra `apo`. Arguments that the package has too mean what they mean there; one of `max_metric_calls`,
    `max_reflection_cost` and `stop_callbacks` is needed.

    Subclasses may override `get_rollout_results` and `make_reflective_dataset`.

    Args:
        reflection_lm: who proposes new texts: the name of a model, an `agl.LLM`, an `agl.Chat`, a client with
            `chat.completions.create`, or a callable `(messages, **settings)`. None and a name ask the server that
            `OPENAI_API_KEY` and `OPENAI_BASE_URL` name, else the Trainer's `llm_proxy`.
        reflection_lm_kwargs: further fields of the requests, such as `temperature`.
        max_metric_calls: ends the search once so many scores were asked for; the iteration that began before is ended.
        max_reflection_cost: ends it once so much is spent; needs `prices`.
        stop_callbacks: stoppers of the package, or callables `(state) -> bool`.
        reflection_minibatch_size: training tasks per iteration; None is the package's default of 3.
        candidate_selection_strategy: which candidate is changed next.
        skip_perfect_score: whether a candidate with nothing but `perfect_score` on a minibatch is left as it is, and
            one with nothing else on the validation tasks ends the search.
        perfect_score: the greatest reward.
        reflection_prompt_template: the prompt of the reflection, with `<curr_param>` and `<side_info>`; a dict has one
            per template.
        module_selector: of several templates, which are changed: `round_robin`, `all`, or an object of the package.
        use_merge: whether candidates of the front are merged too.
        max_merge_invocations: how often at most.
        merge_val_overlap_floor: fewest validation tasks that both must have played.
        acceptance_criterion: what a proposal must do on the minibatch, judged on tasks that both were scored on.
        sampling_strategy: how many proposals an iteration makes; those of one iteration are played in one round.
        selection_strategy: which of them are validated.
        batch_sampler: which training tasks are drawn.
        run_dir: folder of the package's state and of `history.json`; a search that is there already goes on. The state
            is a pickle of data alone, another one is refused: give no folder that others can write to.
        callbacks: callbacks of the package, called in its thread.
        seed: of everything that is drawn.
        templates: names of the templates to search. None is all of them.
        limits: on the calls to the model, see `agl.Limits`; the search then ends with what it has. Rollouts that run
            when the seconds are over are cancelled.
        prices: by model, `(prompt, completion)` of a million tokens each.
        concurrency: calls at the same time.
        retries: of a call that failed and may succeed.
        missing: `retry` plays a task whose rollout earned nothing once more, `skip` does not.
        minimum_coverage: share of the tasks that must have earned something for a candidate to be judged.
        rollout_batch_timeout: seconds for the rollouts of one candidate on one batch; late ones are cancelled.

    Raises:
        BadRequestError: a setting is out of its range; names it.
        MissingExtraError: the package `gepa` is not installed.
    """

    def __init__(
        self,
        reflection_lm: object = None,
        *,
        reflection_lm_kwargs: Mapping[str, Any] | None = None,
        max_metric_calls: int | None = None,
        max_reflection_cost: float | None = None,
        stop_callbacks: Any = None,
        reflection_minibatch_size: int | None = None,
        candidate_selection_strategy: Any = "pareto",
        skip_perfect_score: bool = True,
        perfect_score: float = 1.0,
        reflection_prompt_template: str | Mapping[str, str] | None = None,
        module_selector: Any = "round_robin",
        use_merge: bool = False,
        max_merge_invocations: int = 5,
        merge_val_overlap_floor: int = 5,
        acceptance_criterion: Any = "strict_improvement",
        sampling_strategy: Any = None,
        selection_strategy: Any = None,
        batch_sampler: Any = "epoch_shuffled",
        run_dir: str | Path | None = None,
        callbacks: Sequence[Any] | None = None,
        seed: int = 0,
        templates: Sequence[str] | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        prices: Mapping[str, Sequence[float]] | None = None,
        concurrency: int = 4,
        retries: int = 3,
        missing: Literal["retry", "skip"] = "retry",
        minimum_coverage: float = 0.5,
        rollout_batch_timeout: float = 3600.0,
    ) -> None:
        if importlib.util.find_spec("gepa") is None:
            raise MissingExtraError("GEPA", "apo", "gepa")
        if max_metric_calls is None and max_reflection_cost is None and stop_callbacks is None:
            raise BadRequestError(
                "GEPA needs an end: give max_metric_calls=... (such as 20 times the validation tasks), "
                "max_reflection_cost=... or stop_callbacks=..."
            )
        for name, value in (
            ("max_metric_calls", max_metric_calls),
            ("reflection_minibatch_size", reflection_minibatch_size),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise BadRequestError(f"{name} must be a whole number of 1 or more; got {value!r}")
        if max_reflection_cost is not None and (not prices or not max_reflection_cost > 0):
            raise BadRequestError(
                f"max_reflection_cost={max_reflection_cost!r} must be above 0, and needs prices={{model: (prompt, "
                f"completion)}}, of a million tokens each; got prices={prices!r}"
            )
        if not rollout_batch_timeout > 0:
            raise BadRequestError(f"rollout_batch_timeout must be above 0 seconds; got {rollout_batch_timeout!r}")
        check_missing(missing, minimum_coverage)
        if missing not in ("retry", "skip"):
            raise BadRequestError(f"missing must be retry or skip: a fault is no score of 0; got {missing!r}")
        if isinstance(reflection_lm, Chat) and (prices or Limits.of(limits) != Limits()):
            raise BadRequestError("limits and prices would have no effect beside an agl.Chat: give them to the Chat")
        self.reflection_lm, self.reflection_lm_kwargs = reflection_lm, dict(reflection_lm_kwargs or {})
        self.max_metric_calls, self.max_reflection_cost = max_metric_calls, max_reflection_cost
        self.stop_callbacks = stop_callbacks
        self.reflection_minibatch_size = reflection_minibatch_size
        self.candidate_selection_strategy = candidate_selection_strategy
        self.skip_perfect_score, self.perfect_score = skip_perfect_score, perfect_score
        self.reflection_prompt_template = reflection_prompt_template
        self.module_selector = module_selector
        self.use_merge, self.max_merge_invocations = use_merge, max_merge_invocations
        self.merge_val_overlap_floor = merge_val_overlap_floor
        self.acceptance_criterion = acceptance_criterion
        self.sampling_strategy, self.selection_strategy = sampling_strategy, selection_strategy
        self.batch_sampler = batch_sampler
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.callbacks = list(callbacks or ())
        self.seed = seed
        self.templates = None if templates is None else tuple(templates)
        self.limits, self.prices = Limits.of(limits), dict(prices or {})
        self.concurrency, self.retries = concurrency, retries
        self.missing: MissingPolicy = missing
        self.minimum_coverage, self.rollout_batch_timeout = minimum_coverage, rollout_batch_timeout
        self._make_chat(None)  # wrong settings are told here

    # --- override points ---------------------------------------------------------------------------------------------

    def make_reflective_dataset(
        self, templates: Mapping[str, PromptTemplate], results: Sequence[RolloutResult], name: str
    ) -> Sequence[Mapping[str, Any]]:
        """Return what the model is shown of the results of a candidate to change its template of this name.

        Each record has `Inputs`, `Generated Outputs` and `Feedback`. Called in a thread of the package.
        """
        from agentlightning.prompt_search.gepa.reflection import reflective_records

        return reflective_records(results)

    # --- a run -----------------------------------------------------------------------------------------------------

    @override
    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> PromptResult:
        """Search, and return the best prompts with every version on the way.

        A run that is stopped, or reaches a limit, keeps the best so far in `result`.

        Raises:
            ValueError: a dataset or a prompt template is missing.
            BadRequestError: there is nobody to ask, or `run_dir` holds the search of other prompts or tasks.
            NoCandidateError: no rollout of the seed earned anything.
            ChatError: the model answered no call.
        """
        train, val = items_of("GEPA", "train_dataset", train_dataset), items_of("GEPA", "val_dataset", val_dataset)
        seed_templates(self.get_initial_resources(), self.templates)
        return await self._run(train, val)

    @with_llm_proxy()
    async def _run(self, llm_proxy: LLMProxy | None, train: list[Any], val: list[Any]) -> PromptResult:
        from agentlightning.prompt_search.gepa.adapter import LoopBridge, StoreAdapter
        from agentlightning.prompt_search.gepa.reflection import Reflector
        from agentlightning.prompt_search.gepa.saved import read_saved

        began, log = time.monotonic(), self.get_run_log()
        seeds = seed_templates(self.get_initial_resources(), self.templates)
        name = self._model
        models = [name] if name else []
        say = "GEPA('name of the model'), or give GEPA a client of its own"
        async with asking(
            self._make_chat, self.get_store(), llm_proxy, models=models, purpose="reflection", say=say
        ) as chat:
            if chat.limits.cost is not None or self.max_reflection_cost is not None:
                chat.check_prices(chat.model_asked())
            run_dir = None if self.run_dir is None else private_folder(self.run_dir)
            history = History(log, run_dir)
            seed = PromptVersion("v0", seeds, next(iter(seeds)), state="kept")
            published = functools.partial(read_published, self.get_store(), "gepa", log.run_id)
            chat.start(await history.open(seed, published), run=log.run_id)
            player = PromptPlayer(
                self.get_store(),
                self.get_rollout_results,
                prefix="gepa",
                run=log.run_id or generate_id(12),
                resources=self.get_initial_resources() or {},
                timeout_seconds=self.rollout_batch_timeout,
                config=self.get_rollout_config(),
                missing=self.missing,
                seconds_left=chat.seconds_left,
            )
            bridge = LoopBridge(asyncio.get_running_loop())
            adapter = StoreAdapter(
                bridge,
                player,
                history,
                log,
                chat,
                self.make_reflective_dataset,
                seed=seed,
                val=val,
                missing=self.missing,
                minimum_coverage=self.minimum_coverage,
            )
            saved = None if run_dir is None else await asyncio.to_thread(read_saved, run_dir, seeds, val)
            adapter.restore(await history.go_on(anew=saved is None), saved)
            reflector = Reflector(
                chat, bridge, seeds, self.reflection_prompt_template, adapter.proposed, self.reflection_lm_kwargs
            )
            reason = "interrupted"
            try:
                reason = await self._search(adapter, bridge, reflector, player, chat, train, val, seeds)
            finally:
                best = adapter.best()
                pair = adapter.validated.get(seed.digest), adapter.validated.get(best.digest)
                self.result = result = PromptResult(
                    best=best,
                    history=list(history.versions),
                    best_resources=player.resources_with(best.templates),
                    bill=chat.bill,
                    rollouts=player.rollouts,
                    stop_reason=reason,
                    p_value=None
                    if best is seed or None in pair
                    else min(1.0, sign_test_of(*pair) * (len(adapter.validated) - 1)),  # pyright: ignore[reportArgumentType] -- no None
                    seconds=time.monotonic() - began,
                )
                history.write(best=best.version, bill=chat.bill.as_json(), stop_reason=reason)
            if best is not seed and best.score is not None:
                await log.best("validation", best.score, best.round)
            logger.info("%s", result)
            if reflector.failures and chat.bill.calls == 0:
                raise ChatError(f"The model answered no call: {reflector.failures[-1]}")
            return result

    async def _search(
        self,
        adapter: StoreAdapter,
        bridge: LoopBridge,
        reflector: Reflector,
        player: PromptPlayer,
        chat: Chat,
        train: list[Any],
        val: list[Any],
        seeds: Mapping[str, PromptTemplate],
    ) -> str:
        """Run the package in a thread, and return why it ended.

        Raises:
            Exception: what the package has logged and not raised.
        """
        from gepa import api

        from agentlightning.prompt_search.gepa.adapter import Task
        from agentlightning.prompt_search.gepa.stopping import PairedAcceptance, Stopper

        perfect = self.perfect_score if self.skip_perfect_score else None

        def error() -> Exception | None:
            return reflector.error or adapter.error

        stopper = Stopper(reflector, lambda: player.rollouts, perfect, error=error, check_limits=chat.check_limits)
        given: Any = self.stop_callbacks
        others: list[Any] = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]  # pyright: ignore[reportUnknownArgumentType]
        optimize = cast(Any, api.optimize)  # pyright: ignore[reportUnknownMemberType] -- its type parameters are not known
        work = functools.partial(
            optimize,
            seed_candidate={name: template.template for name, template in seeds.items()},
            trainset=[Task("train", task) for task in train],
            valset=[Task("val", task) for task in val],
            adapter=adapter,
            reflection_strategy=reflector,
            max_metric_calls=self.max_metric_calls,
            max_reflection_cost=self.max_reflection_cost,
            stop_callbacks=[*others, stopper],
            reflection_minibatch_size=self.reflection_minibatch_size,
            candidate_selection_strategy=self.candidate_selection_strategy,
            skip_perfect_score=self.skip_perfect_score,
            perfect_score=self.perfect_score,
            module_selector=self.module_selector,
            use_merge=self.use_merge,
            max_merge_invocations=self.max_merge_invocations,
            merge_val_overlap_floor=self.merge_val_overlap_floor,
            acceptance_criterion=PairedAcceptance(self.acceptance_criterion),
            sampling_strategy=self.sampling_strategy,
            selection_strategy=self.selection_strategy,
            batch_sampler=self.batch_sampler,
            run_dir=None if self.run_dir is None else str(self.run_dir),
            callbacks=[*self.callbacks, adapter],
            logger=_Log(),
            track_best_outputs=False,
            seed=self.seed,
        )
        thread = asyncio.create_task(asyncio.to_thread(work), name="gepa")
        try:
            await asyncio.shield(thread)
        except LimitReached as reached:
            return str(reached)
        except BaseException:
            bridge.close()
            await asyncio.wait([thread])  # its next call ends it
            if not thread.cancelled():
                thread.exception()  # looked at: it is what ended the thread, and no news
            raise
        if (kept_back := error()) is not None:
            raise kept_back
        return stopper.reason or "finished"

    # --- who is asked ------------------------------------------------------------------------------------------------

    @property
    def _model(self) -> str | None:
        return self.reflection_lm if isinstance(self.reflection_lm, str) else None

    def _make_chat(self, source: object) -> Chat:
        if isinstance(self.reflection_lm, Chat):
            return self.reflection_lm if source is None else self.reflection_lm.at(source)
        own = None if self._model else self.reflection_lm
        return Chat(
            source or own,
            model=self._model,
            concurrency=self.concurrency,
            retries=self.retries,
            limits=self.limits,
            prices=self.prices,
        )


class _Log:
    """The package's logger."""

    def log(self, message: str) -> None:
        logger.info("%s", message)
