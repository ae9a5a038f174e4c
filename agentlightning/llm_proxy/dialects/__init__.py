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
from agentlightning.llm_proxy.dialects.completions import Completions
from agentlightning.llm_proxy.dialects.embeddings import Embeddings
from agentlightning.llm_proxy.dialects.messages import Messages
from agentlightning.llm_proxy.dialects.responses import Responses

CHAT = ChatCompletions()
MESSAGES = Messages()
DIALECTS: dict[str, Dialect] = {
    dialect.route: dialect for dialect in (CHAT, Completions(), Responses(), MESSAGES, Embeddings())
}

__all__ = [
    "CHAT",
    "DIALECTS",
    "MESSAGES",
    "Dialect",
    "Json",
    "StreamReader",
    "StreamWriter",
    "TranslatedDialect",
    "WireDialect",
]
