"""Values that enter and leave a store: checks and JSON conversion of users' values, because stored values must always
be readable, and copies of returned values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cache
from typing import Annotated, Any, TypeVar, cast, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from agentlightning.errors import BadRequestError
from agentlightning.semconv import CONTROL_PREFIX
from agentlightning.store.base import UNSET
from agentlightning.types import Attempt, AttemptedRollout, EnqueueRolloutRequest, Rollout, RolloutConfig, Worker
from agentlightning.types.mode import RolloutMode
from agentlightning.utils.rewards import USABLE_REWARD, as_number, as_reward

M = TypeVar("M", bound=BaseModel)
_MOST_NAMES = 100_000
LONGEST_NAME = 512
"""Largest number of characters in the id of a run or the name of a record."""
_SCALARS = frozenset((str, int, float, bool, type(None)))
_PLAIN = frozenset((int, bool, type(None)))
_TEXT = frozenset((str,))
_DEEPEST = 180
"""Largest depth of nesting. The parsers of client and server fail at 200."""


def given(**arguments: object) -> dict[str, Any]:
    """Return the arguments that were supplied."""
    return {name: value for name, value in arguments.items() if value is not UNSET}


def check_limit(limit: int) -> int:
    """Return the limit of a claim, at most 1000.

    Raises:
        BadRequestError: `limit` is not an integer.
    """
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise BadRequestError(f"limit must be an integer; got {limit!r}")
    return limit if limit < 1000 else 1000


def check_names(attempts: Sequence[str]) -> frozenset[str]:
    """Return the attempts of a heartbeat.

    Raises:
        BadRequestError: they are not a list of ids, or there are more than a worker can claim.
    """
    if isinstance(attempts, str) or not all(isinstance(attempt_id, str) for attempt_id in attempts):
        raise BadRequestError("attempts must be a list of attempt ids")
    if len(attempts) > _MOST_NAMES:
        raise BadRequestError(f"A heartbeat can have at most {_MOST_NAMES} attempts; got {len(attempts)}")
    return frozenset(attempts)


def check_rewards(changes: Mapping[str, object]) -> None:
    """Check the reward that a call sets for an attempt.

    Raises:
        BadRequestError: a number is not finite, or its absolute value is above 1e15.
    """
    named = changes.get("rewards")
    rewards: dict[str, object] = {"reward": changes.get("reward")}
    if isinstance(named, Mapping):
        rewards.update(cast("Mapping[str, object]", named))
    for name, value in rewards.items():
        if as_number(value) is not None and as_reward(value) is None:
            raise BadRequestError(
                f"The reward {name!r} is {as_number(value)}; expected {USABLE_REWARD}, or null for no reward"
            )


def check_run_id(run_id: str) -> str:
    """Return the id of a run if it is valid.

    Raises:
        BadRequestError: the id is invalid.
    """
    reserved = isinstance(run_id, str) and run_id.startswith(CONTROL_PREFIX)
    return _check_name("run_id", run_id, f"{CONTROL_PREFIX} and '-' are reserved", reserved)


def check_vocabulary_id(vocabulary_id: str) -> str:
    """Return the id of a vocabulary if it is valid.

    Raises:
        BadRequestError: the id is invalid.
    """
    return _check_name(
        "vocabulary_id", vocabulary_id, "for example the hash of the tokenizer's table", not vocabulary_id
    )


def _check_name(what: str, name: str, hint: str, reserved: bool) -> str:
    if not isinstance(name, str) or reserved or name == "-" or "\0" in name or len(name) > LONGEST_NAME:
        raise BadRequestError(
            f"{what}={str(name)[:80]!r} cannot be used ({len(str(name))} characters); expected a string of at most "
            f"{LONGEST_NAME} characters without null bytes ({hint})"
        )
    return name


def check_timeout(timeout: float | None) -> None:
    """Check the timeout of a call.

    Raises:
        BadRequestError: it is not a number of seconds.
    """
    if timeout is not None and timeout != 0.0 and (isinstance(timeout, str) or math.isnan(timeout)):
        raise BadRequestError(f"timeout must be a number of seconds; got {timeout!r}")


def checked(model: type[BaseModel], changes: dict[str, object]) -> dict[str, Any]:
    """Return changes of some fields, converted to the types of `model`.

    A status is checked later, with the table of `lifecycle`, which has its own error message.

    Raises:
        BadRequestError: a value has the wrong type.
    """
    if changes.keys() <= {"status"}:
        return changes
    values: dict[str, Any] = {}
    for name, value in changes.items():
        with valid(model.__name__, name):
            values[name] = value if name == "status" else _field(model, name).validate_python(value)
    return values


class valid:
    """Report a wrong value in the same way in all stores, in process and over HTTP.

    Raises:
        BadRequestError: a value has the wrong type; the message has the value and the field.
    """

    __slots__ = ("_field", "_what")

    def __init__(self, what: str, field: str = "") -> None:
        self._what = what
        self._field = field

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValidationError):
            raise wrong_value(self._what, error, self._field) from error


def own_config(config: RolloutConfig) -> RolloutConfig:
    """Return a validated copy of a config, because its fields may have been set to any value since its creation.

    Raises:
        BadRequestError: a value has the wrong type.
    """
    with valid("config"):
        return RolloutConfig.model_validate(dict(config) if isinstance(config, RolloutConfig) else config)


def wrong_value(what: str, error: ValidationError, field: str = "") -> BadRequestError:
    """Return the error for the first wrong value in `what`, or in one field of it."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in (field, *first["loc"]) if part != "") or what
    got = repr(first["input"])
    return BadRequestError(
        f"{place} of {what} has a wrong value: {first['msg'][:300]}; got {got[:100]} (errors: {error.error_count()})"
    )


@cache
def _field(model: type[BaseModel], name: str) -> TypeAdapter[object]:
    annotated: Any = Annotated
    field = model.model_fields[name]
    return TypeAdapter[object](annotated[field.annotation, field])


# --- conversion to JSON --------------------------------------------------------------------------------------------


def to_json(value: Any, path: str = "input", depth: int = 0) -> Any:
    """Return `value` as new JSON data. Pydantic models, dataclasses and numpy values are converted.

    Raises:
        TypeError: a value inside is not JSON or nested too deeply; the message gives its position, such as
            `input.items[3]`.
    """
    kind = cast("type[object]", type(value))  # not its `__class__`, which that of a proxy's target may be
    if kind is str:
        return value if value.isascii() else _unicode(value, path)
    if kind is float:
        return value if math.isfinite(value) else None  # JSON has no other numbers
    if kind in _SCALARS:
        return value
    if depth > _DEEPEST:
        raise TypeError(f"{path.split('.')[0].split('[')[0]} has more than {_DEEPEST} levels of nesting; use fewer")
    if kind is dict:
        named: dict[Any, Any] = value.copy()
        if not _TEXT.issuperset(map(type, named)):  # before anything in it is converted, so that nothing is twice
            named = {_key(key, path): item for key, item in named.items()}
        for key, item in named.items():
            if not key.isascii():
                _unicode(key, path)
            if type(item) not in _PLAIN and not (type(item) is str and item.isascii()):
                named[key] = to_json(item, f"{path}.{key}", depth + 1)
        return named
    if kind is list or kind is tuple:
        return [to_json(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(cast("list[object]", value))]
    if isinstance(value, BaseModel):
        try:
            return value.model_dump(mode="json")
        except PydanticSerializationError:  # find the position: convert the fields one by one
            return to_json(dict(value), path, depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: to_json(getattr(value, field.name), f"{path}.{field.name}", depth + 1) for field in fields}
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # numpy scalars and arrays, without importing numpy
        return to_json(cast("Any", value).tolist(), path, depth)
    if isinstance(value, Mapping):
        return to_json(dict(cast("Mapping[object, object]", value)), path, depth)
    for scalar in (str, bool, int, float):
        if isinstance(value, scalar):  # of a subclass, enums of str among them
            return to_json(scalar(getattr(value, "value", value)), path, depth)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return to_json(list(cast("Sequence[object]", value)), path, depth)
    raise TypeError(
        f"{path} is a {type(value).__name__}, not a JSON value; expected dict, list, str, number, bool or None "
        "(pydantic models, dataclasses and numpy values are converted)"
    )


def _key(key: object, path: str) -> str:
    if isinstance(key, str):
        return str(key)
    raise TypeError(f"{path} has a key {key!r} of type {type(key).__name__}; JSON objects must have string keys")


def _unicode(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TypeError(
            f"{path} contains half of a surrogate pair (at {error.start}), which is not valid Unicode or JSON; "
            "replace it, for example with text.encode('utf-8', 'replace').decode()"
        ) from None
    return text


def copy_json(value: Any) -> Any:
    """Return a deep copy of JSON data."""
    if value.__class__ is dict:
        named: dict[str, Any] = value.copy()
        for key, item in named.items():
            if item.__class__ not in _SCALARS:
                named[key] = copy_json(item)
        return named
    if value.__class__ is list:
        return [item if item.__class__ in _SCALARS else copy_json(item) for item in value]
    return value


# --- models without validation -------------------------------------------------------------------------------------
#
# A value inside the store was validated when it came in and is replaced, never changed in place. So versions of it may
# share what did not change, the set of fields that were given included, and the next one need not be validated: every
# operation makes several, and validating costs five times as much.

_slots = cast("Any", BaseModel).__dict__
new_object = object.__new__
set_fields = _slots["__dict__"].__set__
set_names = _slots["__pydantic_fields_set__"].__set__
set_extra = _slots["__pydantic_extra__"].__set__
set_private = _slots["__pydantic_private__"].__set__


def build(cls: type[M], fields: dict[str, object], names: set[str], extra: dict[str, object] | None = None) -> M:
    """Return a value with these fields, which are known to be valid."""
    new = new_object(cls)
    set_fields(new, fields)
    set_names(new, names)
    set_extra(new, extra)
    set_private(new, None)
    return new


def evolve(model: M, **changes: object) -> M:
    """Return the next version of a value: a shallow copy with some fields changed, without validation."""
    return changed(model, changes)


def changed(model: M, changes: dict[str, Any]) -> M:
    """Return the next version of a value. Same as `evolve`, with the changes in a dictionary."""
    return build(model.__class__, model.__dict__ | changes, model.__pydantic_fields_set__, model.__pydantic_extra__)


def new_rollout(fields: dict[str, Any]) -> Rollout:
    """Return a rollout with these values, one for each field in order, which are known to be valid."""
    return build(Rollout, fields, _NAMES[Rollout])


def new_attempt(rollout_id: str, attempt_id: str, number: int, start_time: float, worker_id: str | None) -> Attempt:
    """Return a new attempt with these values, which are known to be valid."""
    fields: dict[str, Any] = {
        **_ATTEMPT_DEFAULTS,
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "sequence_id": number,
        "start_time": start_time,
        "worker_id": worker_id,
    }
    return build(Attempt, fields, _NAMES[Attempt])


def new_request(
    input: Any,
    mode: Any = None,
    resources_id: Any = None,
    config: Any = None,
    metadata: Any = None,
    run_id: Any = None,
    priority: Any = 0,
    not_before: Any = None,
    task_id: Any = None,
) -> EnqueueRolloutRequest:
    """Return a request. It is validated, unless the classes of its values show that they are valid."""
    fields: dict[str, Any] = {
        "input": input,
        "mode": mode,
        "resources_id": resources_id,
        "config": config,
        "metadata": metadata,
        "run_id": run_id,
        "priority": priority,
        "not_before": not_before,
        "task_id": task_id,
    }
    if (
        config is None
        and not_before is None
        and task_id is None
        and (mode is None or (mode.__class__ is str and mode in _MODES))
        and priority.__class__ is int
        and -(2**31) <= priority < 2**31
        and (metadata is None or metadata.__class__ is dict)
        and (resources_id is None or resources_id.__class__ is str)
        and (run_id is None or run_id.__class__ is str)
    ):
        return build(EnqueueRolloutRequest, fields, _NAMES[EnqueueRolloutRequest])
    supplied = {name: value for name, value in fields.items() if name == "input" or value is not _IN_REQUEST[name]}
    return EnqueueRolloutRequest(**supplied)


def _defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Return the fields in their order with their defaults; None for a required field."""
    return {name: None if field.is_required() else field.default for name, field in model.model_fields.items()}


DEFAULT_CONFIG = RolloutConfig()
"""The configuration of a rollout without limits. It is shared, like every value inside the store."""
_ATTEMPT_DEFAULTS = _defaults(Attempt)
_IN_REQUEST = _defaults(EnqueueRolloutRequest)
_MODES = get_args(RolloutMode)
_NAMES: dict[type[BaseModel], set[str]] = {
    cls: set(cls.model_fields)
    for cls in (Rollout, Attempt, AttemptedRollout, RolloutConfig, Worker, EnqueueRolloutRequest)
}
"""All fields of a class: the `model_fields_set` of every returned value, so that assigning a field adds nothing."""


# --- copies for callers --------------------------------------------------------------------------------------------


def _private_fields(rollout: Rollout) -> dict[str, Any]:
    fields = rollout.__dict__.copy()
    fields["input"] = copy_json(fields["input"])
    fields["metadata"] = copy_json(fields["metadata"])
    limits = fields["config"].__dict__.copy()
    limits["retry_condition"] = [*limits["retry_condition"]]  # a program may have put a tuple there
    fields["config"] = build(RolloutConfig, limits, _NAMES[RolloutConfig])
    return fields


def public_rollout(rollout: Rollout) -> Rollout:
    """Return a copy that shares nothing with the store."""
    return build(Rollout, _private_fields(rollout), _NAMES[Rollout])


def public_attempt(attempt: Attempt) -> Attempt:
    """Return a copy that shares nothing with the store."""
    fields = attempt.__dict__.copy()
    if attempt.metadata is not None:
        fields["metadata"] = copy_json(attempt.metadata)
    if attempt.error is not None:
        fields["error"] = copy(attempt.error)
    if attempt.rewards is not None:
        fields["rewards"] = attempt.rewards.copy()
    return build(Attempt, fields, _NAMES[Attempt], attempt.__pydantic_extra__)


def public_worker(worker: Worker) -> Worker:
    """Return a copy that shares nothing with the store."""
    own = {"heartbeat_stats": copy_json(worker.heartbeat_stats)}
    return build(Worker, worker.__dict__ | own, _NAMES[Worker], worker.__pydantic_extra__)


def public_attempted(rollout: Rollout, attempt: Attempt) -> AttemptedRollout:
    """Return a rollout with an attempt as one value that shares nothing with the store."""
    fields = _private_fields(rollout)
    fields["attempt"] = public_attempt(attempt)
    return build(AttemptedRollout, fields, _NAMES[AttemptedRollout])
