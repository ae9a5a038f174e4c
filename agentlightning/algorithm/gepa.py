"""`GEPA`: reflective evolution of prompts with the package `gepa`.

Source: GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning (arXiv:2507.19457). The package
implements the search. `prompt_search/gepa_search.py` implements the rollouts of candidates, the records that the model
sees, the model calls and the stored results.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal

from typing_extensions import TypeVar, override

from agentlightning.algorithm.prompt_algorithm import PromptSearch
from agentlightning.base.field_help import explain_fields
from agentlightning.chat.chat import Chat, ChatError
from agentlightning.errors import BadRequestError, MissingExtraError
from agentlightning.prompt_search.history import PromptResult
from agentlightning.prompt_search.results import RolloutResult
from agentlightning.prompt_search.search import SearchState
from agentlightning.types import Dataset, PromptTemplate

T = TypeVar("T", default=Any)
_OF_THE_PACKAGE = (
    *("max_metric_calls", "max_reflection_cost", "reflection_minibatch_size", "candidate_selection_strategy"),
    *("skip_perfect_score", "perfect_score", "module_selector", "use_merge", "max_merge_invocations"),
    *("merge_val_overlap_floor", "sampling_strategy", "selection_strategy", "batch_sampler", "seed"),
)


@explain_fields
@dataclass(kw_only=True, eq=False, repr=False)
class GEPA(PromptSearch, Generic[T]):
    """Search for better versions of the prompt templates among the initial resources, with the package `gepa`.

    In each iteration a candidate of the Pareto front runs on a minibatch of training tasks, a model reflects on the
    rollouts and proposes a new text, and the new candidate runs on the validation tasks if it is better on the
    minibatch. The agent and all other resources do not change. Returns a `PromptResult`.

    A failed rollout is used as feedback and never scored as 0: it runs again and, if it fails again, is excluded from
    the comparison. Requires the extra `apo`. Arguments that the package also has keep their meaning. One of
    `max_metric_calls`, `max_reflection_cost` and `stop_callbacks` is required.

    `SearchSettings` has the settings of every search over prompts: `templates`, `rollout_batch_timeout`, `missing`,
    `minimum_coverage`, `limits`, `prices`, `concurrency`, `retries` and `seed`.

    Subclasses may override `get_rollout_results` and `make_reflective_dataset`.

    Raises:
        BadRequestError: a setting is out of range. The message names it.
        MissingExtraError: the package `gepa` is not installed.
    """

    _name: ClassVar = "gepa"
    _purpose: ClassVar = "reflection"
    _model_setting: ClassVar = "GEPA('name of the model'), or pass a client to GEPA"

    reflection_lm: object = field(default=None, kw_only=False)
    """Source of new texts: the name of a model, an `agl.LLM`, an `agl.Chat`, a client with `chat.completions.create`,
    or a callable `(messages, **settings)`. None and a name use the server in `OPENAI_API_KEY` and `OPENAI_BASE_URL` or,
    if they are not set, the Trainer's `llm_proxy`."""
    reflection_lm_kwargs: Mapping[str, Any] | None = None
    """Additional fields of the requests, such as `temperature`."""
    max_metric_calls: int | None = None
    """Number of requested scores after which the search ends; the current iteration still finishes."""
    max_reflection_cost: float | None = None
    """Cost of reflection after which the search ends, in the unit of `prices`; requires `prices`."""
    stop_callbacks: Any = None
    """Stoppers of the package, or callables `(state) -> bool`."""
    reflection_minibatch_size: int | None = None
    """Number of training tasks per iteration; None is the package's default of 3."""
    candidate_selection_strategy: Any = "pareto"
    """Strategy that selects the candidate to change next."""
    skip_perfect_score: bool = True
    """Whether to skip a candidate that has `perfect_score` on its full minibatch, and to end the search when a
    candidate has it on all validation tasks."""
    perfect_score: float = 1.0
    """The maximum reward."""
    reflection_prompt_template: str | Mapping[str, str] | None = None
    """The prompt of the reflection, with `<curr_param>` and `<side_info>`; a dict has one prompt per template."""
    module_selector: Any = "round_robin"
    """Selection of the templates to change if there are several: `round_robin`, `all`, or an object of the package."""
    use_merge: bool = False
    """Whether to also merge candidates of the front."""
    max_merge_invocations: int = 5
    """Maximum number of merges of a run."""
    merge_val_overlap_floor: int = 5
    """Minimum number of validation tasks on which both merged candidates must have run."""
    acceptance_criterion: Any = "strict_improvement"
    """Condition for accepting a proposal, on the minibatch tasks for which both candidates have scores."""
    sampling_strategy: Any = None
    """Number of proposals per iteration; the proposals of one iteration run in one round."""
    selection_strategy: Any = None
    """Selection of the proposals to validate."""
    batch_sampler: Any = "epoch_shuffled"
    """Sampler of the training tasks."""
    run_dir: str | Path | None = None
    """Folder of the package's state and of `history.json`; an existing search in it continues. The state is a pickle
    file, which is rejected if it contains anything but data. Do not use a folder that others can write to."""
    callbacks: Sequence[Any] | None = None
    """Callbacks of the package, called in its thread."""
    missing: Literal["retry", "skip"] = "retry"  # pyright: ignore[reportIncompatibleVariableOverride] -- not "zero"
    """Handling of a task whose rollout has no reward: `retry` runs it once more, `skip` does not."""

    @override
    def __post_init__(self) -> None:
        if importlib.util.find_spec("gepa") is None:
            raise MissingExtraError("GEPA", "apo", "gepa")
        if self.max_metric_calls is None and self.max_reflection_cost is None and self.stop_callbacks is None:
            raise BadRequestError(
                "GEPA requires a stop condition: set max_metric_calls=... (such as 20 times the validation tasks), "
                "max_reflection_cost=... or stop_callbacks=..."
            )
        for name in ("max_metric_calls", "reflection_minibatch_size"):
            if getattr(self, name) is not None:
                self._check_whole_number(name)
        if self.max_reflection_cost is not None and (not self.prices or not self.max_reflection_cost > 0):
            raise BadRequestError(
                f"max_reflection_cost={self.max_reflection_cost!r} must be above 0 and requires prices={{model: "
                f"(prompt, completion)}}, per million tokens; got prices={self.prices!r}"
            )
        super().__post_init__()
        if self.missing not in ("retry", "skip"):
            raise BadRequestError(f"missing must be retry or skip (failures never score 0); got {self.missing!r}")
        self.reflection_lm_kwargs = dict(self.reflection_lm_kwargs or {})
        self.run_dir = None if self.run_dir is None else Path(self.run_dir)
        self.callbacks = list(self.callbacks or ())
        self._make_chat(None)  # for its errors

    def make_reflective_dataset(
        self, templates: Mapping[str, PromptTemplate], results: Sequence[RolloutResult], name: str
    ) -> Sequence[Mapping[str, Any]]:
        """Return the records of a candidate's results that the model sees when it changes the template of this name.

        Each record has `Inputs`, `Generated Outputs` and `Feedback`. Called in a thread of the package.
        """
        from agentlightning.prompt_search.gepa_reflection import reflective_records

        return reflective_records(results)

    # --- parts of a run ----------------------------------------------------------------------------------------------

    @override
    def _chat_source(self) -> tuple[object, str | None]:
        return (None, self.reflection_lm) if isinstance(self.reflection_lm, str) else (self.reflection_lm, None)

    @override
    def _check_prices(self, chat: Chat) -> None:
        if chat.limits.cost is not None or self.max_reflection_cost is not None:
            chat.check_prices(chat.model_asked())

    @override
    def _folder(self) -> Path | None:
        return None if self.run_dir is None else Path(self.run_dir)

    @override
    async def _prepare(self, state: SearchState) -> Callable[[], Awaitable[None]]:
        from agentlightning.prompt_search.gepa_search import GEPASearch, PairedAcceptance

        one_or_more: Any = [] if self.stop_callbacks is None else self.stop_callbacks
        search = GEPASearch(
            state,
            self.make_reflective_dataset,
            prompts=self.reflection_prompt_template,
            fields=self.reflection_lm_kwargs or {},
            settings={
                **{name: getattr(self, name) for name in _OF_THE_PACKAGE},
                "acceptance_criterion": PairedAcceptance(self.acceptance_criterion),
                "run_dir": None if self.run_dir is None else str(self.run_dir),
                "stop_callbacks": one_or_more if isinstance(one_or_more, (list, tuple)) else [one_or_more],
                "callbacks": list(self.callbacks or ()),
            },
        )
        await search.resume(self._folder())
        self._failures = search.failures
        return search.run

    @override
    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> PromptResult:
        result = await super().run(train_dataset, val_dataset)
        if self._failures and result.bill.calls == 0:
            raise ChatError(f"All model calls failed; the last error: {self._failures[-1]}")
        return result
