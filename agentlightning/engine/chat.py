"""Converts between messages and tokens: renders prompts, reads completions as messages."""

from __future__ import annotations

import copy
import inspect
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agentlightning.engine.request.fields import RequestError
from agentlightning.engine.request.tool_calls import Reply, messages_for_template, parse_reply, syntax_of

_RESERVED: Final = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"} - {"kwargs"}
"""Names that are not the template's own."""


class ChatFormat:
    """The chat template and vocabulary of one tokenizer. Used by one thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def copy(self) -> ChatFormat:
        """Return the same for another thread: a fast tokenizer must not be used by two at once."""
        return ChatFormat(copy.deepcopy(self._tokenizer))

    def template_reads(self, name: str) -> bool:
        """Return whether the chat template speaks of a variable."""
        return name in str(self._tokenizer.chat_template)

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_fields: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return what the model reads before it replies. `template_fields` are further variables of the template.

        Raises:
            RequestError: A message is malformed, the template refuses the conversation, or a variable is not its own.
        """
        if taken := sorted(_RESERVED & (template_fields or {}).keys()):
            raise RequestError(
                f"'chat_template_kwargs' cannot set {', '.join(map(repr, taken))}: only variables of the template",
                param="chat_template_kwargs",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                messages_for_template(messages),
                tools=cast("list[Any]", list(tools)) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
                **(template_fields or {}),
            )
        except (ValueError, TypeError, TemplateError) as error:
            raise RequestError(
                f"the messages do not fit the model's chat template: {error}", param="messages"
            ) from error
        prompt_ids = self._tokenizer(cast("str", text), add_special_tokens=False)["input_ids"]
        if not prompt_ids:
            raise RequestError("the chat template gives an empty prompt", param="messages")
        return cast("list[int]", prompt_ids)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast("str", text)  # of one sequence

    def reply(self, token_ids: Sequence[int], *, with_tools: bool) -> Reply:
        """Return the reply in tokens, the one that ends it left out; tool calls are read if tools were offered."""
        whole = self.text(token_ids)
        return self.read(whole) if with_tools else Reply(content=whole)

    def read(self, text: str, tools: Sequence[Mapping[str, Any]] = (), *, constrained: bool = False) -> Reply:
        """Return what a text says and which of the tools it calls, in the syntax of the chat template; under a grammar
        calls are always in that of Hermes."""
        return parse_reply(text, "hermes" if constrained else syntax_of(str(self._tokenizer.chat_template)), tools)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary writes it."""
        return cast("list[str]", self._tokenizer.convert_ids_to_tokens(list(token_ids)))


def message_body(reply: Reply, ids: int | None = None) -> dict[str, Any]:
    """Return the reply as an assistant message of the API; each tool call gets an id of its own, made from `ids`, or
    by chance."""
    if not reply.tool_calls:
        return {"role": "assistant", "content": reply.content or ""}
    calls = [
        {
            "id": f"call_{uuid.uuid4().hex if ids is None else f'{ids:016x}{number:04x}'}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(reply.tool_calls)
    ]
    return {"role": "assistant", "content": reply.content, "tool_calls": calls}
