"""Node's openai and @anthropic-ai/sdk clients: every dialect; tools, streams, calls side by side, parsed answers."""

from __future__ import annotations

from tests.frameworks.node.node_programs import OBJECTS, needs_node, program
from tests.frameworks.suite import IN_STYLES, PARSED, SAID, SEVERAL_TOOLS, THOUGHTS_KEPT, TOOL_LOOP, WORDS, keeps

pytestmark = needs_node

LOOPS = {
    "chat": "openai.mjs chat",
    "responses": "openai.mjs responses",
    "responses remembered": "openai.mjs responsesRemembered",
    "messages": "anthropic.mjs tool",
}
RUNNER = {"messages": "anthropic.mjs toolRunner"}
REFUSED = {"refused": 1}
"""The tool runner asks for a server that remembers, once."""

test_a_tool_loop = keeps(TOOL_LOOP, SEVERAL_TOOLS, THOUGHTS_KEPT, on=LOOPS)(program)
test_the_tool_runner = keeps(TOOL_LOOP, SEVERAL_TOOLS, THOUGHTS_KEPT, on=RUNNER, options=REFUSED)(program)
test_streams_of_chat_completions = keeps(WORDS, on={"chat": "openai.mjs chatStreams"})(program)
test_streams = keeps(
    WORDS, on={"responses": "openai.mjs responsesStreams", "messages": "anthropic.mjs streams"}, streams="last"
)(program)
test_structured_output = keeps(
    PARSED,
    on={
        "chat": "openai.mjs chatParsed",
        "responses": "openai.mjs responsesParsed",
        "messages": "anthropic.mjs parsed",
    },
    outputs=OBJECTS,
)(program)
test_calls_made_side_by_side = keeps(
    IN_STYLES, on={"chat": "openai.mjs chatSideBySide", "messages": "anthropic.mjs sideBySide"}
)(program)
test_thoughts_over_messages = keeps(
    THOUGHTS_KEPT,
    on={"messages": "anthropic.mjs thinking"},
    outputs=[["Thought  1.", "Thought  3.", answer] for answer in SAID],
)(program)
