"""Error classes. Each one also derives from a standard class, so that you can catch `ValueError` for example.

Your code raises plain Python errors, and the runner converts them to an outcome of the attempt (`runner/agent.py`).
The errors of this package state what was wrong, what was expected and what to do. A store server sends the name of the
class (`error_type`), and the client raises the same class.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable


class AgentLightningError(Exception):
    """Base class of all errors of this package."""

    http_status: int = 500


class NotFoundError(AgentLightningError, ValueError):
    """The rollout, attempt, worker, run or resource does not exist (HTTP 404)."""

    http_status = 404


class ConflictError(AgentLightningError, ValueError):
    """The change is not allowed in the current state (HTTP 409)."""

    http_status = 409


class BadRequestError(AgentLightningError, ValueError):
    """An argument has the right type but a wrong value (HTTP 400)."""

    http_status = 400


class TokenReusedError(BadRequestError):
    """The token of a call was already used for a call with other arguments (HTTP 422)."""

    http_status = 422


class GoneError(AgentLightningError, RuntimeError):
    """The object existed and was removed, for example evicted spans (HTTP 410)."""

    http_status = 410


class TooLargeError(AgentLightningError, ValueError):
    """A body, batch or value exceeds its limit (HTTP 413)."""

    http_status = 413


class BusyError(AgentLightningError, RuntimeError):
    """The store or a queue is full. Retry after `retry_after` seconds (HTTP 429)."""

    http_status = 429

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnauthorizedError(AgentLightningError, PermissionError):
    """The token is missing or wrong (HTTP 401)."""

    http_status = 401


class StoreUnreachableError(AgentLightningError, ConnectionError):
    """The store did not respond within the client's deadline. The message lists the attempts to reach it (HTTP 503)."""

    http_status = 503


class StoreWriteError(AgentLightningError, OSError):
    """The store could not write, for example because the disk is full. Nothing of the call was stored (HTTP 507)."""

    http_status = 507


class DamagedRecordError(AgentLightningError, RuntimeError):
    """A record of the store is damaged and cannot be read; the message names it. The request was valid (HTTP 500)."""


class PolicyFault(AgentLightningError):
    """Raised by an agent to report that the policy failed, with the reward for the failure.

    The attempt ends with the outcome `policy_fault` and is trained with exactly `reward`. By default, any other
    exception is an `infrastructure_fault` and is excluded from training.
    """

    def __init__(self, message: str, *, reward: float) -> None:
        super().__init__(message)
        self.reward = reward

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), reward=self.reward), self.args


class RewardError(AgentLightningError, ValueError, TypeError):
    """The emitted value is not a valid reward. This is an error in the agent's code and never a policy fault."""


class ServiceError(AgentLightningError, RuntimeError):
    """A model that the framework calls, such as a judge, returned no usable response.

    It is not a policy fault, unless the Trainer's `policy_faults` contain this class or a subclass.
    """


class MissingExtraError(AgentLightningError, ImportError):
    """A feature needs a package that is not installed. The message contains the command that installs it."""

    def __init__(self, feature: str, extra: str, missing: str) -> None:
        super().__init__(
            f"{feature} needs the package '{missing}', which is not installed. "
            f"Install it with: pip install 'agl-framework[{extra}]'"
        )


class EngineError(AgentLightningError, RuntimeError):
    """The process that serves a model did not start, ended unexpectedly, or failed to carry out a request."""


class NonFiniteLossError(AgentLightningError, ArithmeticError):
    """The loss was NaN or infinite in several consecutive steps."""


class OutOfMemoryError(AgentLightningError, MemoryError):
    """A model or one training row needs more memory than is available. The message has the sizes and what to change."""


class RunnerDiedError(AgentLightningError, RuntimeError):
    """Runner processes ended unexpectedly. The message has the worker, the exit code and the cause."""


class LedgerError(AgentLightningError, RuntimeError):
    """The training ledger is inconsistent: a model call is neither trained nor excluded, or both."""


class NoTrainableCallError(AgentLightningError, ValueError):
    """No model call of a rollout can be trained. The message has the source of each call, the reason and a remedy."""


class NoScoredRolloutError(AgentLightningError, RuntimeError):
    """A training run ended without a rollout to train on. The message has their outcomes and the first error."""


class TooMuchDriftError(AgentLightningError, RuntimeError):
    """Too many prompts were tokenized differently from their recording (`max_drift`). The message has an example."""


WIRE_ERRORS: dict[str, type[AgentLightningError]] = {
    cls.__name__: cls
    for cls in (
        NotFoundError,
        ConflictError,
        TokenReusedError,
        BadRequestError,
        GoneError,
        TooLargeError,
        BusyError,
        UnauthorizedError,
        StoreUnreachableError,
        StoreWriteError,
        DamagedRecordError,
    )
}
"""Classes that a server sends by name and a client raises again. A subclass comes before its base class."""


def closest_name(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to `name`; None if no similarity is at least `cutoff` (0 to 1)."""
    import difflib  # only for an error

    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint with the most similar known name, to append to an error message; empty if none is similar."""
    near = closest_name(name, known)
    return f"; did you mean {near!r}?" if near else ""
