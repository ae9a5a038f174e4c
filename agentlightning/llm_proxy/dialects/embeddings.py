"""OpenAI's embeddings: passed on. Nothing is generated, so nothing is asked for and nothing is trained."""

from __future__ import annotations

from typing import Any, NoReturn

from typing_extensions import override

from agentlightning.llm_proxy.dialects.base import Json, WireDialect, checked, read_json, read_json_object
from agentlightning.llm_proxy.dialects.completions import prompts


class Embeddings(WireDialect):
    """`POST /embeddings`."""

    route = "embeddings"
    kind = "embedding"
    reply_form = "JSON with a list 'data'"
    generates = False

    @override
    def read_request(self, raw: bytes) -> Json:
        request = read_json_object(raw)
        checked(request, "model", str, "a string")
        checked(request, "input", (str, list), "a string or a list")
        return request

    @override
    def prompt_of(self, request: Json) -> list[Any]:
        return prompts(request["input"])

    @override
    def wants_stream(self, request: Json) -> bool:
        return False

    @override
    def read_reply(self, raw: bytes) -> Json | None:
        reply = read_json(raw)
        return reply if reply is not None and isinstance(reply.get("data"), list) else None

    @override
    def record_of(self, reply: Json) -> Json:
        return {**{name: value for name, value in reply.items() if name != "data"}, "choices": []}

    @override
    def read_stream(self, request: Json) -> NoReturn:
        raise AssertionError("embeddings have no streams")

    @override
    def stream_of(self, reply: Json, request: Json) -> NoReturn:
        raise AssertionError("embeddings have no streams")
