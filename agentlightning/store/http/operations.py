"""HTTP encoding of the operations: the server reads arguments and writes a result, and a client does the reverse.

It is derived at import from the declarations and signatures in `store/base.py`. To add an operation, add a method
there, and a script in `rules/` with a method in `engine/`. `tests/store/http/test_operations.py` finds missing ones.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NotRequired, Required, cast, get_args, get_origin, get_type_hints
from urllib.parse import quote

from pydantic import BaseModel, TypeAdapter, with_config
from typing_extensions import TypedDict

from agentlightning.errors import BadRequestError
from agentlightning.store.base import UNSET, LightningStore, Unset
from agentlightning.store.operations import OPERATIONS as DECLARED
from agentlightning.store.operations import Operation
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
"""Path segment for the run without a name."""
API_AGL_PREFIX = "/agl"
"""Path prefix of the operations below /v1."""

Arguments = dict[str, Any]
"""Arguments of an operation by name."""
POLL_SECONDS = 20.0
"""Longest wait of one request at the server, in seconds. The client splits a longer wait into several requests."""

_Adapter = TypeAdapter[Any]


class WireOperation:
    """An operation with the decoders and encoders of server and client."""

    def __init__(self, declared: Operation) -> None:
        self.declared = declared
        self.name = declared.name
        self.method, self.path = declared.ways[0]
        self.signature = declared.signature
        hints = get_type_hints(getattr(LightningStore, declared.name), include_extras=True)
        self.parameters = declared.parameters
        self.in_path = [part[1:-1] for part in self.path.split("/") if part.startswith("{")]
        self.in_body = [name for name in self.parameters if name not in self.in_path]
        if declared.body is not None:
            self.in_query = [name for name in self.in_body if name != declared.body]
            self.body_type = _Adapter(hints[declared.body])
        else:
            self.in_query = []
            self.body_type = _Adapter(self._object_type(hints))
        self.query_type = _Adapter(self._object_type(hints))
        self.in_filter = frozenset(RolloutFilter.model_fields if "filter" in self.parameters else ())
        """Arguments of a query string that are fields of the argument `filter`."""
        self.answer = _Adapter(hints["return"])
        kind = hints["return"]
        self.is_page = not declared.bounded and (
            get_origin(kind) is PaginatedResult or (isinstance(kind, type) and issubclass(kind, PaginatedResult))
        )
        """The limit can be -1, for all items."""

    def _object_type(self, hints: Mapping[str, object]) -> Any:
        fields: dict[str, object] = {}
        for name in self.in_body:
            required = self.signature.parameters[name].default is inspect.Parameter.empty
            kind: Any = hints[name]
            if Unset in get_args(kind):  # taken out; a null that is refused must reach that check
                parts = tuple(part for part in get_args(kind) if part is not Unset)
                kind = Any if Any in parts else typing.Union[(*parts, None)]
            fields[name] = Required[kind] if required else NotRequired[kind]
        made = TypedDict(f"{self.name}_arguments", fields)  # type: ignore[misc]  # pyright: ignore -- made from the signature
        return with_config({"extra": "ignore"})(cast("Any", made))

    # --- the server's side -----------------------------------------------------------------------------------------

    def read_body(self, body: bytes) -> Arguments:
        """Return the keyword arguments in a JSON body.

        Raises:
            pydantic.ValidationError: the body has the wrong shape.
        """
        if self.declared.body is not None:
            return {self.declared.body: self.body_type.validate_json(body)}
        arguments: Arguments = self.body_type.validate_json(body or b"{}")
        return self._checked(arguments)

    def read_query(self, pairs: Iterable[tuple[str, str]]) -> Arguments:
        """Return the keyword arguments in a query string. Repeated keys become a list."""
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
        if self.declared.body is not None:
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
            if value is None and name in self.declared.never_null:
                raise BadRequestError(f"{name} is invalid; it cannot be a null value.")
        return arguments

    def write_answer(self, value: object) -> bytes:
        """Return the JSON of a result."""
        if self.is_page and isinstance(value, PaginatedResult):
            page = cast("PaginatedResult[BaseModel]", value)
            items = b",".join(item.__pydantic_serializer__.to_json(item) for item in page.items)
            cursor = b"null" if page.cursor is None else json.dumps(page.cursor).encode()
            numbers = (page.limit, page.offset, page.total)
            return b'{"items":[%s],"limit":%d,"offset":%d,"total":%d,"cursor":%s}' % (items, *numbers, cursor)
        encoded = self.answer.dump_json(value, serialize_as_any=True)
        return b'{"%s":%s}' % (self.declared.wrap.encode(), encoded) if self.declared.wrap else encoded

    # --- the client's side -----------------------------------------------------------------------------------------

    def bind(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Arguments:
        """Return the supplied arguments of a call that differ from their defaults, by name.

        Raises:
            TypeError: the arguments do not match the signature.
            BadRequestError: `mode` and `config.mode` differ.
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
        if self.declared.body == "resources":
            arguments["resources"] = stored_forms(arguments["resources"])
        if self.name == "enqueue_many_rollouts":  # as the store itself takes them, or refuses them
            with valid("rollouts"):
                rollouts = cast("Iterable[object]", arguments["rollouts"])
                requests = [EnqueueRolloutRequest.model_validate(each) for each in rollouts]
            arguments["rollouts"] = [
                evolve(each, input=to_json(each.input), metadata=each.metadata and to_json(each.metadata, "metadata"))
                for each in requests
            ]
        if self.in_filter and "filter" in arguments:
            arguments["filter"] = filter_of(arguments["filter"])
        if self.name == "update_attempt":
            check_rewards(arguments)
        if self.name == "add_run_records":  # its numbers may be ones that JSON lacks
            records = cast("Iterable[RunRecord]", arguments["records"])
            with valid("records"):
                arguments["records"] = [dict(RunRecord.model_validate(record)) for record in records]
        return arguments

    def path_of(self, arguments: Arguments) -> str:
        """Remove the path arguments from `arguments`, and return the path with their escaped values."""
        path = self.path
        for name in self.in_path:
            value = arguments.pop(name)
            text = check_run_id(value) or NO_NAME if name == "run_id" else str(value)
            # a value equal to a word of the table is escaped, to differ from it (`utils/http/dispatch.py`)
            segment = f"%{ord(text[0]):02X}{text[1:]}" if text in _WORDS else quote(text, safe="")
            path = path.replace("{" + name + "}", segment)
        return path

    def read_answer(self, body: bytes) -> Any:
        """Return the result in the JSON of a response."""
        if self.declared.wrap:
            wrapped: dict[str, object] = _ANY.validate_json(body)
            return self.answer.validate_python(wrapped[self.declared.wrap])
        return self.answer.validate_json(body)


OPERATIONS: dict[str, WireOperation] = {each.name: WireOperation(each) for each in DECLARED.values() if each.ways}
"""Operations with a path, by name."""
_ANY: _Adapter = TypeAdapter(Any)
_WORDS = {
    segment
    for each in OPERATIONS.values()
    for segment in each.path.split("/")
    if segment and not segment.startswith("{")
}
