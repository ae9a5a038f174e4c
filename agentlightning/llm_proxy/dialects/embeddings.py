"""OpenAI's embeddings. Nothing is generated, so no tokens are requested and nothing is trained."""

from __future__ import annotations

from typing_extensions import override

from agentlightning.llm_proxy.dialects.base import Dialect
from agentlightning.llm_proxy.dialects.completions import prompts
from agentlightning.llm_proxy.dialects.json_values import Json, read_json


class Embeddings(Dialect):
    """`POST /embeddings`."""

    route = "embeddings"
    kind = "embedding"
    prompt_field = ("input", (str, list), "a string or a list")
    reply_form = "JSON with a list 'data'"
    limit_names = ()
    generates = False

    @override
    def prompt_of(self, request: Json) -> list[object]:
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
