"""The operation table: for each operation its HTTP method, path, and where each argument travels.

From a row and the signature in `base.py` follow, at import: how the server reads the arguments, how it writes the
answer, what the client sends and how it reads the reply. To add an operation: a method in `base.py`, a script in
`rules/` with its method in `engine/`, a row here. `tests/store/http/test_operations.py` fails when one is missing.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, Required, cast, get_args, get_origin, get_type_hints
from urllib.parse import quote

from pydantic import BaseModel, TypeAdapter, with_config
from typing_extensions import TypedDict

from agentlightning.errors import BadRequestError
from agentlightning.field_help import explain_fields
from agentlightning.store.base import UNSET, LightningStore, Unset
from agentlightning.store.rules.values import check_rewards, check_run_id, evolve, to_json, valid
from agentlightning.store.summaries.plan import filter_of
from agentlightning.types import (
    EnqueueRolloutRequest,
    PaginatedResult,
    RolloutConfig,
    RolloutFilter,
    RunRecord,
)
from agentlightning.types.core import with_mode_of_config
from agentlightning.types.resources import stored_forms

PREFIX = "/v1/agl"
NO_NAME = "-"
"""Stands in a path for the run without a name."""
API_AGL_PREFIX = "/agl"
"""Public name of the prefix below /v1."""

Arguments = dict[str, Any]
"""Arguments of an operation, by name."""
Retry = Literal["safe", "token"]
"""`safe`: repeating the request changes nothing more. `token`: the request carries one and is answered again."""


@explain_fields
@dataclass(frozen=True)
class Row:
    """One row of the table as it is written down."""

    operation: str
    """Name of the method of `LightningStore`."""
    method: Literal["GET", "POST"]
    """The HTTP method of a request."""
    path: str
    """Below the prefix; `{name}` is an argument in the path, literal segments win over it."""
    body: str | None = None
    """The one argument that is the whole body; None sends an object of all arguments that are not in the path."""
    wrap: str | None = None
    """Key under which the answer is wrapped in an object."""
    status: int = 200
    """The HTTP status of an answer."""
    retry: Retry = "safe"
    """What makes it safe to repeat a request whose answer was lost."""
    also: tuple[tuple[Literal["GET", "POST", "PUT"], str], ...] = ()
    """Further ways to call it, with the same arguments."""
    bounded: bool = False
    """Its pages have a limit of their own; those of others may ask for all there is."""
    slow: bool = False
    """Its work grows with the data: a try is not given up early, for the next one would begin anew."""


ROWS: tuple[Row, ...] = (
    Row("statistics", "GET", "/statistics", slow=True),
    Row("start_rollout", "POST", "/rollouts", status=201, retry="token"),
    Row("enqueue_many_rollouts", "POST", "/queues/rollouts/enqueue", status=201, retry="token"),
    Row("dequeue_many_rollouts", "POST", "/queues/rollouts/dequeue", retry="token"),
    Row(
        "start_attempt",
        "POST",
        "/rollouts/{rollout_id}/attempts",
        status=201,
        retry="token",
        also=(("POST", "/rollouts/{rollout_id}/attempt"), ("POST", "/rollouts/{rollout_id}/start")),
    ),
    Row("add_span", "POST", "/spans", body="span", status=201),
    Row("add_many_spans", "POST", "/spans/batch", status=201),
    Row("get_next_span_sequence_id", "POST", "/spans/next", wrap="sequence_id"),
    Row("get_many_span_sequence_ids", "POST", "/spans/next/batch", wrap="sequence_ids"),
    Row("query_rollouts", "POST", "/rollouts/search", also=(("GET", "/rollouts"),), slow=True),
    Row(
        "query_rollout_summaries",
        "POST",
        "/rollouts/summaries",
        also=(("GET", "/rollouts/summaries"),),
        slow=True,
        bounded=True,
    ),
    Row("aggregate_rollouts", "POST", "/rollouts/aggregate", slow=True),
    Row(
        "query_attempts",
        "POST",
        "/rollouts/{rollout_id}/attempts/search",
        also=(("GET", "/rollouts/{rollout_id}/attempts"),),
        slow=True,
    ),
    Row("query_spans", "POST", "/spans/search", also=(("GET", "/spans"),), slow=True),
    Row("query_span_outlines", "GET", "/spans/outlines", slow=True, bounded=True),
    Row("get_span", "GET", "/rollouts/{rollout_id}/attempts/{attempt_id}/spans/{span_id}"),
    Row("query_workers", "POST", "/workers/search", also=(("GET", "/workers"),), slow=True),
    Row("query_resources", "GET", "/resources", slow=True),
    Row("get_rollout_by_id", "GET", "/rollouts/{rollout_id}"),
    Row("get_latest_attempt", "GET", "/rollouts/{rollout_id}/attempts/latest"),
    Row("get_worker_by_id", "GET", "/workers/{worker_id}"),
    Row("get_latest_resources", "GET", "/resources/latest"),
    Row("query_resource_versions", "GET", "/resources/{resources_id}/versions", bounded=True),
    Row("get_resources_by_id", "GET", "/resources/{resources_id}"),
    Row("add_resources", "POST", "/resources", body="resources", status=201, retry="token"),
    Row(
        "update_resources",
        "POST",
        "/resources/{resources_id}",
        body="resources",
        retry="token",
        also=(("PUT", "/resources/{resources_id}"),),
    ),
    Row("update_rollout", "POST", "/rollouts/{rollout_id}", retry="token"),
    Row("update_attempt", "POST", "/rollouts/{rollout_id}/attempts/{attempt_id}", retry="token"),
    Row(
        "update_worker",
        "POST",
        "/workers/{worker_id}/heartbeat",
        retry="token",
        also=(("POST", "/workers/{worker_id}"),),
    ),
    Row("delete_rollouts", "POST", "/rollouts/delete", wrap="deleted", retry="token", slow=True),
    Row("start_run", "POST", "/runs/{run_id}/start", retry="token"),
    Row("update_run", "POST", "/runs/{run_id}", retry="token"),
    Row("get_run_by_id", "GET", "/runs/{run_id}"),
    Row("query_runs", "POST", "/runs/search", also=(("GET", "/runs"),), slow=True),
    Row("add_run_records", "POST", "/runs/{run_id}/records", wrap="added", status=201, retry="token"),
    Row(
        "query_run_records",
        "POST",
        "/runs/{run_id}/records/search",
        also=(("GET", "/runs/{run_id}/records"),),
        slow=True,
    ),
    Row("rewind_run", "POST", "/runs/{run_id}/rewind", wrap="removed", retry="token", slow=True),
    Row("delete_runs", "POST", "/runs/delete", wrap="deleted", retry="token", slow=True),
    Row("add_vocabulary", "POST", "/vocabularies/{vocabulary_id}", body="tokens", wrap="added"),
    Row("get_vocabulary", "GET", "/vocabularies/{vocabulary_id}"),
    Row("get_token_texts", "POST", "/vocabularies/{vocabulary_id}/texts"),
    Row("observe_metric", "POST", "/metrics/observations"),  # one that is repeated counts twice, and no more
    Row("import_history", "POST", "/history", status=201, slow=True),
    Row("query_events", "POST", "/events/search"),
    Row("wait_for_rollouts", "POST", "/waits/rollouts"),
    Row("finish_attempt", "POST", "/rollouts/{rollout_id}/attempt/{attempt_id}/finish", retry="token"),
    Row("finish_rollout", "POST", "/rollouts/{rollout_id}/finish", retry="token"),
    Row("register_worker", "POST", "/workers", retry="token"),
)

LONG_POLLS = frozenset(("dequeue_many_rollouts", "query_events", "wait_for_rollouts"))
"""Operations that may wait at the server; the client asks in chunks of at most `POLL_SECONDS`."""
POLL_SECONDS = 20.0


_Adapter = TypeAdapter[Any]


class Operation:
    """A row joined with the signature of its method: decoders and encoders for both ends."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.name = row.operation
        function = getattr(LightningStore, row.operation)
        self.signature = inspect.signature(function)
        hints = get_type_hints(function, include_extras=True)
        self.parameters = [name for name in self.signature.parameters if name != "self"]
        self.in_path = [part[1:-1] for part in row.path.split("/") if part.startswith("{")]
        self.in_body = [name for name in self.parameters if name not in self.in_path]
        if row.body is not None:
            self.in_query = [name for name in self.in_body if name != row.body]
            self.body_type = _Adapter(hints[row.body])
        else:
            self.in_query = []
            self.body_type = _Adapter(self._object_type(hints))
        self.query_type = _Adapter(self._object_type(hints))
        self.in_filter = frozenset(RolloutFilter.model_fields if "filter" in self.parameters else ())
        """Arguments of a query string that are fields of the argument `filter`."""
        self.answer = _Adapter(hints["return"])
        kind = hints["return"]
        self.is_page = not row.bounded and (
            get_origin(kind) is PaginatedResult or (isinstance(kind, type) and issubclass(kind, PaginatedResult))
        )
        """Its limit may be -1, for all there is."""
        self.returns_null = type(None) in get_args(kind)

    def _object_type(self, hints: Mapping[str, object]) -> Any:
        fields: dict[str, object] = {}
        for name in self.in_body:
            required = self.signature.parameters[name].default is inspect.Parameter.empty
            kind: Any = hints[name]
            if Unset in get_args(kind):  # taken out; a null that `_NEVER_NULL` refuses must reach that check
                left = tuple(part for part in get_args(kind) if part is not Unset)
                kind = Any if Any in left else typing.Union[(*left, None)]
            fields[name] = Required[kind] if required else NotRequired[kind]
        made = TypedDict(f"{self.name}_arguments", fields)  # type: ignore[misc]  # pyright: ignore -- made from the signature
        return with_config({"extra": "ignore"})(cast("Any", made))

    # --- the server's side -----------------------------------------------------------------------------------------

    def read_body(self, body: bytes) -> Arguments:
        """Return the keyword arguments that a JSON body holds.

        Raises:
            pydantic.ValidationError: wrong shape.
        """
        if self.row.body is not None:
            return {self.row.body: self.body_type.validate_json(body)}
        arguments: Arguments = self.body_type.validate_json(body or b"{}")
        return self._checked(arguments)

    def read_query(self, pairs: Iterable[tuple[str, str]]) -> Arguments:
        """Return the keyword arguments that a query string holds; repeated keys make a list."""
        raw: dict[str, list[str]] = {}
        filters: dict[str, Any] = {}
        for key, value in pairs:
            if key in self.in_filter:
                kind = str(RolloutFilter.model_fields[key].annotation)
                filters[key] = [*filters.get(key, ()), value] if "list[" in kind else value
            elif key in self.parameters and key not in self.in_path:
                raw.setdefault(key, []).append(value)
        kinds = {name: str(self.signature.parameters[name].annotation) for name in raw}
        lists = {name for name, kind in kinds.items() if "Sequence[" in kind or "list[" in kind}
        flat: dict[str, Any] = {name: values if name in lists else values[-1] for name, values in raw.items()}
        if filters:
            flat["filter"] = filters
        if self.row.body is not None:
            return {name: flat[name] for name in self.in_query if name in flat}
        return self._checked(self.query_type.validate_python(flat))

    def _checked(self, arguments: Arguments) -> Arguments:
        if self.is_page:
            limit, offset = arguments.get("limit", -1), arguments.get("offset", 0)
            if limit == 0 or limit < -1:
                raise BadRequestError("Limit must be greater than 0 or -1 for no limit")
            if offset < 0:
                raise BadRequestError("Offset must be greater than or equal to 0")
        for name, value in arguments.items():
            if value is None and name in _NEVER_NULL.get(self.name, ()):
                raise BadRequestError(f"{name} is invalid; it cannot be a null value.")
        return arguments

    def write_answer(self, value: object) -> bytes:
        """Return the JSON of an answer."""
        if self.is_page and isinstance(value, PaginatedResult):
            page = cast("PaginatedResult[BaseModel]", value)
            items = b",".join(item.__pydantic_serializer__.to_json(item) for item in page.items)
            cursor = b"null" if page.cursor is None else json.dumps(page.cursor).encode()
            numbers = (page.limit, page.offset, page.total)
            return b'{"items":[%s],"limit":%d,"offset":%d,"total":%d,"cursor":%s}' % (items, *numbers, cursor)
        encoded = self.answer.dump_json(value, serialize_as_any=True)
        return b'{"%s":%s}' % (self.row.wrap.encode(), encoded) if self.row.wrap else encoded

    # --- the client's side -----------------------------------------------------------------------------------------

    def bind(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Arguments:
        """Return the arguments of a call that were given and say something, by name.

        Raises:
            TypeError: the call does not fit the signature.
            BadRequestError: mode and config say different modes.
        """
        bound = self.signature.bind(None, *args, **kwargs).arguments
        bound.pop("self")
        parameters = self.signature.parameters
        arguments = {
            name: value for name, value in bound.items() if value is not UNSET and value is not parameters[name].default
        }
        config = arguments.get("config")
        if isinstance(config, RolloutConfig) and config.mode is not None:  # it does not travel inside of the config
            arguments["mode"], arguments["config"] = with_mode_of_config(arguments.get("mode"), config)
        if self.row.body == "resources":
            arguments["resources"] = stored_forms(arguments["resources"])
        if self.name == "enqueue_many_rollouts":  # as the store itself takes them, or refuses them
            with valid("rollouts"):
                given = cast("Iterable[object]", arguments["rollouts"])
                requests = [EnqueueRolloutRequest.model_validate(each) for each in given]
            arguments["rollouts"] = [
                evolve(each, input=to_json(each.input), metadata=each.metadata and to_json(each.metadata, "metadata"))
                for each in requests
            ]
        if self.in_filter and "filter" in arguments:
            arguments["filter"] = filter_of(arguments["filter"])
        if self.name == "update_attempt":
            check_rewards(arguments)
        if self.name == "add_run_records":  # whose numbers may be none that JSON has
            records = cast("Iterable[RunRecord]", arguments["records"])
            with valid("records"):
                arguments["records"] = [dict(RunRecord.model_validate(record)) for record in records]
        return arguments

    def path_of(self, arguments: Arguments) -> str:
        """Take the arguments out that travel in the path, and return the path with them, escaped."""
        path = self.row.path
        for name in self.in_path:
            value = arguments.pop(name)
            text = check_run_id(value) or NO_NAME if name == "run_id" else str(value)
            # one that is a word of the table is escaped, so that it is not taken for it (`utils/http/dispatch.py`)
            segment = f"%{ord(text[0]):02X}{text[1:]}" if text in _WORDS else quote(text, safe="")
            path = path.replace("{" + name + "}", segment)
        return path

    def read_answer(self, body: bytes) -> Any:
        """Return the value that an answer's JSON holds."""
        if self.row.wrap:
            wrapped: dict[str, object] = _ANY.validate_json(body)
            return self.answer.validate_python(wrapped[self.row.wrap])
        return self.answer.validate_json(body)


_WORDS = {segment for row in ROWS for segment in row.path.split("/") if segment and not segment.startswith("{")}


_ANY: _Adapter = TypeAdapter(Any)
_NEVER_NULL: dict[str, tuple[str, ...]] = {
    "update_rollout": ("status", "config"),
    "update_attempt": ("status", "last_heartbeat_time"),
    "update_worker": ("heartbeat_stats",),
    "update_run": ("state",),
}


OPERATIONS: dict[str, Operation] = {row.operation: Operation(row) for row in ROWS}
"""The table, by operation."""

__all__ = [
    "API_AGL_PREFIX",
    "LONG_POLLS",
    "OPERATIONS",
    "POLL_SECONDS",
    "PREFIX",
    "ROWS",
    "Operation",
    "Row",
]
