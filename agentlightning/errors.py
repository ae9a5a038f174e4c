"""Error classes, each also the standard class it refines, so that a caller may catch `ValueError`.

The policy: code of users raises plain Python errors, which the runner turns into an outcome of the
attempt (`runner/agent.py`). Our own errors say what was wrong, what was expected and what to do. Over HTTP the class
travels by name (`error_type`) and the client raises the class that the store raised.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable


class AgentLightningError(Exception):
    """Base class of every error that this package defines."""

    http_status: int = 500


class NotFoundError(AgentLightningError, ValueError):
    """The named rollout, attempt, worker or resource does not exist (HTTP 404)."""

    http_status = 404


class ConflictError(AgentLightningError, ValueError):
    """The change is not allowed in the current state (HTTP 409)."""

    http_status = 409


class BadRequestError(AgentLightningError, ValueError):
    """An argument has the right type but a wrong value (HTTP 400)."""

    http_status = 400


class TokenReusedError(BadRequestError):
    """The token of a call was used before, for a call with other arguments (HTTP 422)."""

    http_status = 422


class GoneError(AgentLightningError, RuntimeError):
    """The object existed and was dropped, for example evicted spans (HTTP 410)."""

    http_status = 410


class TooLargeError(AgentLightningError, ValueError):
    """A body, batch or value exceeds its limit (HTTP 413)."""

    http_status = 413


class BusyError(AgentLightningError, RuntimeError):
    """A bounded queue is full; retry after `retry_after` seconds (HTTP 429)."""

    http_status = 429

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnauthorizedError(AgentLightningError, PermissionError):
    """The token is missing or wrong (HTTP 401)."""

    http_status = 401


class StoreUnreachableError(AgentLightningError, ConnectionError):
    """The store did not answer within the client's deadline; the text describes the tries."""

    http_status = 503


class StoreWriteError(AgentLightningError, OSError):
    """The store could not write: disk full, file read-only, ... Nothing of the call was stored (HTTP 507)."""

    http_status = 507


class DamagedRecordError(AgentLightningError, RuntimeError):
    """A record of the store cannot be read; the text names it. The store's data is wrong, not the request (HTTP
    500)."""


class PolicyFault(AgentLightningError):
    """Raised by an agent to report that the policy failed, with the reward for it.

    The attempt ends as `policy_fault` and is trained with exactly `reward`. Any other exception is an
    `infrastructure_fault` and is never trained.
    """

    def __init__(self, message: str, *, reward: float) -> None:
        super().__init__(message)
        self.reward = reward

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), reward=self.reward), self.args


class RewardError(AgentLightningError, ValueError, TypeError):
    """The value that an agent's program emits is not a reward.

    Never a policy fault, as with `ServiceError`: the program is wrong.
    """


class ServiceError(AgentLightningError, RuntimeError):
    """A model that the framework calls, such as a judge, gave no usable answer.

    Never a policy fault, unless the Trainer's `policy_faults` name this class or a subclass.
    """


class MissingExtraError(AgentLightningError, ImportError):
    """A feature needs packages that are not installed; the text holds the command that installs them."""

    def __init__(self, feature: str, extra: str, missing: str) -> None:
        super().__init__(
            f"{feature} needs the package '{missing}', which is not installed. "
            f"Install it with: pip install 'agl-framework[{extra}]'"
        )


class EngineError(AgentLightningError, RuntimeError):
    """The process that serves a model does not start, ended by itself, or did not carry out a request."""


class NonFiniteLossError(AgentLightningError, ArithmeticError):
    """The loss was NaN or infinite in several steps in a row."""


class OutOfMemoryError(AgentLightningError, MemoryError):
    """A model, or one row of it, needs more memory than is available; the text holds the numbers and what to change."""


class RunnerDiedError(AgentLightningError, RuntimeError):
    """Runner processes ended unexpectedly; names worker, exit code and cause."""


class LedgerError(AgentLightningError, RuntimeError):
    """The training ledger is inconsistent: a model call is neither trained nor excluded, or is both."""


class NoTrainableCallError(AgentLightningError, ValueError):
    """No model call of a rollout can be trained; describes who recorded each call, why it is excluded, what to try."""


class NoScoredRolloutError(AgentLightningError, RuntimeError):
    """A training run ended without one rollout to learn from; describes how they ended and the first error."""


class TooMuchDriftError(AgentLightningError, RuntimeError):
    """Too many prompts were tokenized differently from their recording (`max_drift`); the text shows an example."""


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
"""Classes that a server names in its reply and a client raises again; a subclass comes before its base class."""


def closest_name(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is closest to a wrong one; None if no similarity is at least `cutoff` (0 to 1)."""
    import difflib  # only for an error

    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the closest known one; empty if none is similar."""
    near = closest_name(name, known)
    return f"; did you mean {near!r}?" if near else ""
