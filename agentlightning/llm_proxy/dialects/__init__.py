"""The dialects that the gateway speaks, by their route."""

from agentlightning.llm_proxy.dialects.base import (
    Dialect,
    Json,
    StreamReader,
    StreamWriter,
    TranslatedDialect,
    WireDialect,
)
from agentlightning.llm_proxy.dialects.chat import ChatCompletions

CHAT = ChatCompletions()
DIALECTS: dict[str, Dialect] = {dialect.route: dialect for dialect in (CHAT,)}

__all__ = ["CHAT", "DIALECTS", "Dialect", "Json", "StreamReader", "StreamWriter", "TranslatedDialect", "WireDialect"]
