"""The end of an attempt: its outcome, and the report to the store and to the log.

| the agent ...                                  | status    | outcome              | reason            |
| ---------------------------------------------- | --------- | -------------------- | ----------------- |
| returned or emitted a reward                   | succeeded | scored               |                   |
| ... and had more spans than are kept           | succeeded | scored               | spans_cut         |
| ... and a model call was refused permanently   | succeeded | scored               | refused_call      |
| returned None and emitted no reward            | succeeded | unscored             | no_reward         |
| raised `PolicyFault`, or a class in the mapping | failed    | policy_fault         | policy_fault      |
| raised anything else (also `SystemExit`)       | failed    | infrastructure_fault | exception         |
| returned NaN, infinity, more than 1e15 in size | failed    | infrastructure_fault | invalid_reward    |
| returned an invalid result (also a program)    | failed    | infrastructure_fault | invalid_result    |
| needed resources that do not exist             | failed    | infrastructure_fault | missing_resources |
| exceeded `timeout_seconds` (also its command)  | timeout   | cancelled            | timeout           |
| was stopped                                    | failed    | cancelled            | stopped           |
| raised `CancelledError` without cancellation   | failed    | cancelled            | cancelled         |
| was ended: its result could no longer count    | failed    | cancelled            | cancelled         |
| finished, but the store was unreachable        | failed    | infrastructure_fault | spans_lost        |
| finished, but the store refused its spans      | failed    | infrastructure_fault | spans_refused     |
| could not begin: the store was unreachable     | failed    | infrastructure_fault | store_unreachable |
| died with its process (also the runner's)      | failed    | infrastructure_fault | runner_died       |
| ended because its budget was used up           | failed    | infrastructure_fault | budget            |

A policy fault gets the reward that is configured for it. Only scored attempts and policy faults are trained.
Readers of the spans derive the reason `refused_call`, for every kind of runner (`training/rollouts.py`); such an
attempt is trained only if the algorithm is configured to do so. Attempts that were lost because the store was
unreachable are retried in addition to `max_attempts` (`store/rules/lifecycle.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, cast

from agentlightning.errors import ConflictError, PolicyFault, RewardError, ServiceError
from agentlightning.litagent.litagent import AgentFault
from agentlightning.semconv import BUDGET_EXHAUSTED, RAW_SPAN, LightningCallAttributes
from agentlightning.store.base import LightningStore, request_token
from agentlightning.store.rules.lifecycle import SPANS_LOST, STOPPED, STORE_UNREACHABLE
from agentlightning.tracer.delivery import TraceDeliveryError
from agentlightning.types import AttemptedRollout, AttemptError, AttemptStatus, Outcome
from agentlightning.utils.backoff import retry_for
from agentlightning.utils.exceptions import message_of, readable
from agentlightning.utils.id import generate_id
from agentlightning.utils.masking import masked_text
from agentlightning.utils.otel import full_qualified_name
from agentlightning.utils.rewards import USABLE_REWARD, as_number, as_reward
from agentlightning.utils.texts import mended

logger = logging.getLogger(__name__)

TRACEBACK_BYTES = 8 * 1024
MESSAGE_BYTES = 4 * 1024
CANCELLED_REPORT_SECONDS = 1.0
"""Seconds for the report while the runner is being stopped, which has its own time limit."""
_ERROR_CODE = LightningCallAttributes.ERROR_CODE.value
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
PolicyFaults = Mapping[type[Exception], float]
"""Exception classes that are policy faults, each with its reward."""


class AttemptFault(AgentFault, RuntimeError):
    """An attempt failed for an internal reason, not through an exception of the agent."""


class InvalidResult(AttemptFault, TypeError, ValueError):
    """The agent returned a value that is not a reward."""

    reason = "invalid_result"


class InvalidReward(AttemptFault, ValueError):
    """The reward is NaN, infinite or too large, or a `reward_fn` returned no valid one."""

    reason = "invalid_reward"


class MissingResources(AttemptFault):
    """The resources that the rollout names, or the agent needs, do not exist."""

    reason = "missing_resources"


class StoreAway(AttemptFault):
    """The store did not respond for the maximum outage, and the attempt cannot continue without it."""

    reason = STORE_UNREACHABLE


class TimeLimitExceeded(AttemptFault, TimeoutError):
    """The attempt exceeded the `timeout_seconds` of its rollout."""

    reason = "timeout"


class AgentCancelled(AttemptFault):
    """The agent raised `CancelledError`, but the attempt was not cancelled."""

    reason = "cancelled"


class AttemptOver(AttemptFault):
    """The rollout has ended, or a later attempt of it has started, so the result of this attempt cannot count."""

    reason = "cancelled"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one attempt."""

    status: AttemptStatus
    outcome: Outcome
    reason: str | None = None
    error: AttemptError | None = None
    reward: float | None = None
    """A reward that is not stored yet, or None."""
    cause: BaseException | None = None

    @property
    def excluded(self) -> bool:
        """True if the attempt is excluded from training, even if it has spans."""
        return self.outcome in ("infrastructure_fault", "cancelled")

    @property
    def stops_runner(self) -> bool:
        """True if it ended because the runner is being stopped."""
        return isinstance(self.cause, (asyncio.CancelledError, KeyboardInterrupt))


SCORED = Ending("succeeded", "scored")
UNSCORED = Ending("succeeded", "unscored", "no_reward")


def ending_of(error: BaseException, policy_faults: PolicyFaults) -> Ending:
    """Return the ending of an attempt that raised this exception. Never a success."""
    error = readable(error)
    described = describe(error)
    if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)):
        return Ending("failed", "cancelled", STOPPED, described, cause=error)
    if isinstance(error, AgentFault):  # the exception classifies itself
        status = "timeout" if error.reason == "timeout" else "failed"
        outcome = "cancelled" if error.reason in ("timeout", "cancelled") else "infrastructure_fault"
        return Ending(status, outcome, error.reason, described, cause=error)
    if isinstance(error, TraceDeliveryError):
        reason = SPANS_LOST if error.unanswered else "spans_refused"
        return Ending("failed", "infrastructure_fault", reason, described, cause=error)
    if isinstance(error, PolicyFault):
        earned = error.reward
    else:  # the reward of a policy fault, by the nearest class in the mapping
        classes = type(error).__mro__
        # A judge that does not answer, or an invalid reward: a general class in the mapping does not cover these.
        if ours := [cls for cls in classes if cls in (ServiceError, RewardError)]:
            classes = classes[: classes.index(ours[0]) + 1]
        nearest = next((cls for cls in classes if cls in policy_faults), None)
        earned = None if nearest is None else policy_faults[nearest]
    if earned is None:
        return Ending("failed", "infrastructure_fault", "exception", described, cause=error)
    reward = as_reward(earned)
    if reward is None:
        return Ending("failed", "infrastructure_fault", "invalid_reward", described, cause=error)
    return Ending("failed", "policy_fault", "policy_fault", described, reward, error)


def describe(error: BaseException) -> AttemptError:
    """Return class, message and last part of the traceback of a readable exception, from the agent's code on.

    Secrets in them are hidden.
    """
    stack = masked_text("".join(traceback.format_exception(type(error), error, agents_part(error))))
    message = masked_text(message_of(error)).encode("utf-8", "replace")[:MESSAGE_BYTES]
    end = stack.encode("utf-8", "replace")[-TRACEBACK_BYTES:]
    return AttemptError(
        type=mended(full_qualified_name(type(error))),
        message=masked_text(message.decode("utf-8", "ignore")),
        traceback=masked_text(end.decode("utf-8", "ignore")),  # a longer text is not searched for names
    )


def agents_part(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame outside this package; the complete one if there is none."""
    part = error.__traceback__
    while part is not None and part.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        part = part.tb_next
    return part or error.__traceback__


def check_policy_faults(policy_faults: object) -> dict[type[Exception], float]:
    """Return the exception classes that are policy faults, with their rewards; an error names an invalid entry."""
    if policy_faults is not None and not isinstance(policy_faults, Mapping):
        raise TypeError(f"policy_faults must be a dict such as {{ValueError: 0.0}}; got {policy_faults!r}")
    faults = dict(cast("Mapping[Any, Any]", policy_faults or {}))
    for cls, reward in faults.items():
        if not (isinstance(cls, type) and issubclass(cls, Exception)):
            raise TypeError(
                f"policy_faults must map exception classes to rewards, such as {{ValueError: 0.0}}; got {cls!r}"
            )
        if isinstance(reward, bool) or as_number(reward) is None:
            raise TypeError(f"policy_faults[{cls!r}] must be a number, the reward for this exception; got {reward!r}")
        if as_reward(reward) is None:
            raise ValueError(
                f"policy_faults: the reward for {cls.__name__} must be finite; got {as_number(reward)}, expected "
                f"{USABLE_REWARD}"
            )
    return faults


# --- the report ------------------------------------------------------------------------------------------------------


async def report(
    store: LightningStore, rollout: AttemptedRollout, ending: Ending, prefix: str, *, seconds: float
) -> None:
    """Report the end of the attempt to the store; retry while the store does not respond, for at most `seconds`.

    Never raises: a failed report is logged as an error. The caller releases the attempt, and its lease runs out.
    """
    seconds = CANCELLED_REPORT_SECONDS if ending.stops_runner else seconds
    token = generate_id(32)  # the same for all tries: the first one that arrives counts

    async def update() -> None:
        request_token.set(token)  # within its own task
        await store.update_attempt(
            rollout.rollout_id,
            rollout.attempt.attempt_id,
            status=ending.status,
            outcome=ending.outcome,
            outcome_reason=ending.reason,
            error=ending.error,
        )

    try:
        await retry_for(seconds, update, f"{prefix} end of an attempt")
    except ConflictError as error:
        logger.warning("%s attempt was already ended in the store: %s", prefix, error)
    except Exception as error:  # not answered in time; or refused, which a retry cannot change
        logger.error(
            "%s the end of attempt %s (%s) could not be stored, so its lease will run out: %s: %s",
            prefix,
            rollout.attempt.attempt_id,
            ending.outcome,
            type(error).__name__,
            error,
        )


def log_failure(ending: Ending, prefix: str) -> None:
    """Log a failed attempt; with the traceback if the user has to act."""
    cause = ending.cause
    if cause is None:
        return
    serious = ending.outcome == "infrastructure_fault"
    shown = (type(cause), cause, agents_part(cause)) if serious and ending.reason == "exception" else None
    text = masked_text(str(cause)) if ending.error is None else ending.error.message
    if shown is not None and ending.error is not None:
        whole = "".join(traceback.format_exception(*shown))
        if masked_text(whole) != whole:  # it contains a secret: log the stored text instead
            shown, text = None, f"{text}\n{ending.error.traceback}"
    logger.log(
        logging.ERROR if serious else logging.INFO,
        "%s attempt failed as %s (%s): %s: %s",
        prefix,
        ending.outcome,
        ending.reason,
        type(cause).__name__,
        text,
        exc_info=shown,
    )


async def with_budget_reason(ending: Ending, store: LightningStore, rollout: AttemptedRollout) -> Ending:
    """Return the ending of an attempt that raised an exception, with the reason `budget` if that is its cause."""
    if ending.reason != "exception" or ending.cause is None:
        return ending
    waiting, visited = [ending.cause], set[int]()
    while waiting:  # the exception, its causes, and the members of groups, each once
        each = waiting.pop()
        if id(each) in visited:
            continue
        visited.add(id(each))
        with contextlib.suppress(Exception):  # a broken __str__ in the user's class
            if getattr(each, "code", None) == BUDGET_EXHAUSTED or BUDGET_EXHAUSTED in str(each):
                return replace(ending, reason="budget")
        grouped: Any = getattr(each, "exceptions", ())  # of an ExceptionGroup
        related: list[object] = [each.__cause__, each.__context__, *(grouped if isinstance(grouped, tuple) else ())]
        waiting.extend(other for other in related if isinstance(other, BaseException))
    try:
        records = await store.query_spans(
            rollout.rollout_id,
            rollout.attempt.attempt_id,
            name=RAW_SPAN,
            sort_by="sequence_id",
            sort_order="desc",
            limit=1,
        )
    except Exception as error:  # the attempt has failed anyway; only its reason stays general
        logger.debug("[Rollout %s] the outcome of its last call could not be read: %s", rollout.rollout_id, error)
        return ending
    refused = any(record.attributes.get(_ERROR_CODE) == BUDGET_EXHAUSTED for record in records)
    return replace(ending, reason="budget") if refused else ending
