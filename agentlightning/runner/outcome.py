"""How an attempt ends: the error policy of agents, stated once.

| the agent ...                                  | status    | outcome              | reason            |
| ---------------------------------------------- | --------- | -------------------- | ----------------- |
| returned or emitted a reward                   | succeeded | scored               |                   |
| ... and had more spans than are kept           | succeeded | scored               | spans_cut         |
| returned None and emitted no reward            | succeeded | unscored             | no_reward         |
| raised `PolicyFault`, or a class in the mapping | failed    | policy_fault         | policy_fault      |
| raised anything else, `SystemExit` too         | failed    | infrastructure_fault | exception         |
| returned NaN or infinity                       | failed    | infrastructure_fault | invalid_reward    |
| returned what is no reward, a program too      | failed    | infrastructure_fault | invalid_result    |
| asked for resources that are not there         | failed    | infrastructure_fault | missing_resources |
| ran past `timeout_seconds`, its command too    | timeout   | cancelled            | timeout           |
| was stopped                                    | failed    | cancelled            | stopped           |
| raised `CancelledError` by itself              | failed    | cancelled            | cancelled         |
| finished, but the store was away for too long  | failed    | infrastructure_fault | spans_lost        |
| finished, but the store refused its spans      | failed    | infrastructure_fault | spans_refused     |
| could not begin: the store was away            | failed    | infrastructure_fault | store_unreachable |
| died with its process, its runner's too        | failed    | infrastructure_fault | runner_died       |
| ended because its budget was used up           | failed    | infrastructure_fault | budget            |

A policy fault earns exactly the reward that was said for it. Nothing that is not in the first three rows is trained.
What was lost because the store was away is made again, beside `max_attempts` (`store/rules/lifecycle.py`).
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from agentlightning.emitter.reward_values import as_reward
from agentlightning.errors import AgentLightningError, PolicyFault
from agentlightning.litagent.command.process import ProgramResultError, ProgramTimedOut
from agentlightning.store.rules.lifecycle import SPANS_LOST, STOPPED, STORE_UNREACHABLE
from agentlightning.tracer.delivery import TraceDeliveryError
from agentlightning.types import AttemptError, AttemptStatus, Outcome
from agentlightning.utils.exceptions import message_of, readable
from agentlightning.utils.otel import full_qualified_name
from agentlightning.utils.secret_values import without_keys
from agentlightning.utils.texts import mended

TRACEBACK_BYTES = 8 * 1024
MESSAGE_BYTES = 4 * 1024
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
PolicyFaults = Mapping[type[Exception], float]
"""Exception classes that are the policy's fault, and what each earns."""


class AttemptFault(AgentLightningError, RuntimeError):
    """An attempt failed for a reason of ours, not by an exception of the agent's."""

    reason = "exception"


class InvalidResult(AttemptFault, TypeError, ValueError):
    """The agent returned something that is no reward."""

    reason = "invalid_result"


class InvalidReward(AttemptFault, ValueError):
    """The reward is NaN or infinite, or what should give one does not."""

    reason = "invalid_reward"


class MissingResources(AttemptFault):
    """The resources that the rollout names, or the agent needs, do not exist."""

    reason = "missing_resources"


class StoreAway(AttemptFault):
    """The store did not answer for as long as an outage may last, and the attempt cannot go on without."""

    reason = STORE_UNREACHABLE


class TimeLimitExceeded(AttemptFault, TimeoutError):
    """The attempt ran past the `timeout_seconds` of its rollout."""

    reason = "timeout"


class AgentCancelled(AttemptFault):
    """The agent raised `CancelledError` by itself; nobody had asked the attempt to stop."""

    reason = "cancelled"


@dataclass(frozen=True, slots=True)
class Ending:
    """How one attempt ended."""

    status: AttemptStatus
    outcome: Outcome
    reason: str | None = None
    error: AttemptError | None = None
    reward: float | None = None
    """A reward that is still to be stored, or None."""
    cause: BaseException | None = None

    @property
    def excluded(self) -> bool:
        """True if nothing of the attempt is trained, whatever it left behind."""
        return self.outcome in ("infrastructure_fault", "cancelled")

    @property
    def stops_runner(self) -> bool:
        """True if it ended because the runner itself is being stopped."""
        return isinstance(self.cause, (asyncio.CancelledError, KeyboardInterrupt))


SCORED = Ending("succeeded", "scored")
UNSCORED = Ending("succeeded", "unscored", "no_reward")


def ending_of(error: BaseException, policy_faults: PolicyFaults) -> Ending:
    """Return how an attempt ends that was left by this exception. Never a success."""
    error = readable(error)
    described = describe(error)
    if isinstance(error, (TimeLimitExceeded, ProgramTimedOut)):
        return Ending("timeout", "cancelled", "timeout", described, cause=error)
    if isinstance(error, AgentCancelled):
        return Ending("failed", "cancelled", error.reason, described, cause=error)
    if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)):
        return Ending("failed", "cancelled", STOPPED, described, cause=error)
    if isinstance(error, AttemptFault):
        return Ending("failed", "infrastructure_fault", error.reason, described, cause=error)
    if isinstance(error, TraceDeliveryError):
        reason = SPANS_LOST if error.unanswered else "spans_refused"
        return Ending("failed", "infrastructure_fault", reason, described, cause=error)
    if isinstance(error, ProgramResultError):
        return Ending("failed", "infrastructure_fault", "invalid_result", described, cause=error)
    if isinstance(error, PolicyFault):
        reward = float(error.reward)
    else:  # what a fault of the policy earns, by the nearest class in the mapping
        nearest = next((cls for cls in type(error).__mro__ if cls in policy_faults), None)
        reward = None if nearest is None else float(policy_faults[nearest])
    if reward is None:
        return Ending("failed", "infrastructure_fault", "exception", described, cause=error)
    if as_reward(reward) is None:
        return Ending("failed", "infrastructure_fault", "invalid_reward", described, cause=error)
    return Ending("failed", "policy_fault", "policy_fault", described, reward, error)


def describe(error: BaseException) -> AttemptError:
    """Return class, message and last part of the traceback of a readable exception, from the agent's own code on."""
    stack = "".join(traceback.format_exception(type(error), error, agents_part(error)))
    message = message_of(error)
    return AttemptError(
        type=mended(full_qualified_name(type(error))),
        message=without_keys(message).encode("utf-8", "replace")[:MESSAGE_BYTES].decode("utf-8", "ignore"),
        traceback=without_keys(stack).encode("utf-8", "replace")[-TRACEBACK_BYTES:].decode("utf-8", "ignore"),
    )


def agents_part(error: BaseException) -> TracebackType | None:
    """Return the traceback without our frames above the first that is not of this package; whole if all are."""
    part = error.__traceback__
    while part is not None and part.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        part = part.tb_next
    return part or error.__traceback__


def check_policy_faults(policy_faults: PolicyFaults | None) -> dict[type[Exception], float]:
    """Return the mapping if it is one.

    Raises:
        TypeError: a key is no exception class.
        ValueError: a reward is not finite.
    """
    for cls, reward in (policy_faults or {}).items():
        if not (isinstance(cls, type) and issubclass(cls, Exception)):
            raise TypeError(
                f"policy_faults maps exception classes to rewards, such as {{ValueError: 0.0}}; got {cls!r}"
            )
        if as_reward(reward) is None:
            raise ValueError(f"policy_faults: the reward for {cls.__name__} must be finite; got {reward}")
    return dict(policy_faults or {})
