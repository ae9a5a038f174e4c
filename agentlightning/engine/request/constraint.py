"""What the text of a reply must be, as a grammar in the Lark dialect of llguidance; only text is made here.

A forced tool call is written as chat templates write it (`tool_calls.py`), with its arguments in the spelling of
`json.dumps`, so that a template that renders the call again gives the same text, and the row goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.engine.request.tool_calls import CALL_CLOSING, CALL_OPENING

_SPELLING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class JsonShape:
    """A JSON value.

    Attributes:
        schema: JSON schema.
        strict: what the library does not know of the schema is an error; otherwise it is passed over.
    """

    schema: Mapping[str, Any]
    strict: bool = False

    def lark(self) -> str:
        """Return the expression of the value."""
        given = self.schema.get("x-guidance")
        options = {**(given if isinstance(given, dict) else {}), **_SPELLING, "lenient": not self.strict}
        return f"%json {json.dumps({**self.schema, 'x-guidance': options})}"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A reply that is one JSON value, or calls of these tools; either one if both are given.

    Attributes:
        value: the JSON value; None allows none.
        functions: name and arguments of the tools that may be called.
        several: more than one call may be made.
        param: the field of the request that asked for it, for errors.
    """

    value: JsonShape | None = None
    functions: Sequence[tuple[str, JsonShape]] = field(default_factory=list[tuple[str, JsonShape]])
    several: bool = True
    param: str = "response_format"

    def lark(self, special: Mapping[str, int]) -> str:
        """Return the grammar. `special` names the tokens that are no text to the tokenizer, with their ids."""
        starts, rules = list[str](), list[str]()
        if self.value is not None:
            starts.append("value")
            rules.append(f"value: {self.value.lark()}")
        if self.functions:
            starts.append('call ("\\n"? call)*' if self.several else "call")
            names = " | ".join(f"f{number}" for number in range(len(self.functions)))
            rules.append(f'call: opening "\\n"? ({names}) "\\n"? closing')
            for name, text in (("opening", CALL_OPENING), ("closing", CALL_CLOSING)):
                spelt = json.dumps(text)
                rules.append(f"{name}: <[{special[text]}]> | {spelt}" if text in special else f"{name}: {spelt}")
        for number, (name, arguments) in enumerate(self.functions):
            head = f'{{"name": {json.dumps(name)}, "arguments": '
            rules.append(f'f{number}: {json.dumps(head)} a{number} "}}"')
            rules.append(f"a{number}: {arguments.lark()}")
        return "\n".join([f"start: {' | '.join(starts)}", *rules]) + "\n"
