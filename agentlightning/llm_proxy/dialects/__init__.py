"""The dialects of the gateway by their route: the one place where a dialect is registered.

Routes, policies, the dialects that a model's entry may list and the readers of requests all follow from this table.
"""

from agentlightning.llm_proxy.dialects.anthropic.dialect import Messages, NativeMessages
from agentlightning.llm_proxy.dialects.base import Dialect, TranslatedDialect, WireDialect
from agentlightning.llm_proxy.dialects.chat import ChatCompletions
from agentlightning.llm_proxy.dialects.completions import Completions
from agentlightning.llm_proxy.dialects.embeddings import Embeddings
from agentlightning.llm_proxy.dialects.responses.dialect import NativeResponses, Responses

CHAT = ChatCompletions()
MESSAGES = Messages(NativeMessages())
RESPONSES = Responses(NativeResponses())
DIALECTS: dict[str, Dialect] = {
    dialect.route: dialect for dialect in (CHAT, Completions(), RESPONSES, MESSAGES, Embeddings())
}

__all__ = ["CHAT", "DIALECTS", "MESSAGES", "RESPONSES", "Dialect", "TranslatedDialect", "WireDialect"]
