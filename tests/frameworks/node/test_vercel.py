"""The Vercel AI SDK: generateText, streamText and its agent; over responses, chat, its compatible chat and messages."""

from __future__ import annotations

from tests.frameworks import suite
from tests.frameworks.harness import run_agent
from tests.frameworks.node.node_programs import OBJECTS, needs_node, program
from tests.frameworks.suite import keeps, rollout_of

pytestmark = needs_node

PROVIDERS = {"responses": "responses", "chat": "chat", "compatible": "compatible", "messages": "anthropic"}


def ways(agent: str, *names: str) -> dict[str, str]:
    return {name: f"vercel.mjs {agent} {PROVIDERS[name]}" for name in names or PROVIDERS}


test_a_tool_loop = keeps(suite.TOOL_LOOP, suite.SEVERAL_TOOLS, on=ways("toolLoop"))(program)
test_a_streamed_run = keeps(suite.WORDS, on=ways("streams"))(program)
test_structured_output = keeps(suite.PARSED, on=ways("parsed"), outputs=OBJECTS)(program)
test_structured_output_after_a_tool = keeps(suite.PARSED, on=ways("parsedAfterTool"), outputs=OBJECTS, rows=[2])(
    program
)
test_calls_made_side_by_side = keeps(suite.IN_STYLES, on=ways("sideBySide"))(program)
test_its_agent_goes_on_with_its_own_conversation = keeps(suite.CONVERSATION, on=ways("agent"))(program)
test_providers_that_give_thoughts_back = keeps(
    suite.THOUGHTS_KEPT, on=ways("toolLoop", "responses", "compatible", "messages")
)(program)
test_the_provider_that_drops_thoughts = keeps(suite.THOUGHTS_DROPPED, on=ways("toolLoop", "chat"))(program)


def test_a_refusal_that_the_stream_swallows_is_not_trained() -> None:
    agent = rollout_of(program, "vercel.mjs swallowed responses")
    for result in run_agent(agent, lambda _: "A large number.", exact=False):
        assert result.output == ["A large number.", ""]
        assert result.evidence.latest is not None
        assert result.evidence.latest.outcome_reason == "refused_call"
        assert list(result.record.exclusions.values()) == ["refused_call", "refused"]
        assert result.record.samples == []
