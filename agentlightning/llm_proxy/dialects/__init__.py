"""The registry of the gateway's dialects, by route.

Routes, policies, the dialects in a model's entry, and the readers of requests are derived from this table.
"""

from agentlightning.llm_proxy.dialects.base import Dialect, TranslatedDialect
from agentlightning.llm_proxy.dialects.chat import ChatCompletions
from agentlightning.llm_proxy.dialects.completions import Completions, Embeddings
from agentlightning.llm_proxy.dialects.messages import Messages
from agentlightning.llm_proxy.dialects.responses import Responses

CHAT = ChatCompletions()
MESSAGES = Messages()
RESPONSES = Responses()
DIALECTS: dict[str, Dialect] = {
    dialect.route: dialect for dialect in (CHAT, Completions(), RESPONSES, MESSAGES, Embeddings())
}

__all__ = ["CHAT", "DIALECTS", "MESSAGES", "RESPONSES", "Dialect", "TranslatedDialect"]
