"""The OpenAI Agents SDK for JavaScript: tools, streams, an agent as a tool and handoffs, each agent with its role."""

from __future__ import annotations

from tests.frameworks.engine import Json, calculator, call, offered
from tests.frameworks.node.node_programs import needs_node, program
from tests.frameworks.suite import ASKED, TOOL_LOOP, Promise, asking, keeps

pytestmark = needs_node


def ways(*agents: str) -> dict[str, str]:
    return {f"{way} {name}": f"agents-js.mjs {name} {way}" for name in agents for way in ("chat", "responses")}


test_a_tool_loop = keeps(TOOL_LOOP, on=ways("toolLoop"), direct=False)(program)
test_an_agent_and_the_one_that_is_its_tool_are_selected_by_their_roles = keeps(
    ASKED,
    on=ways("agentAsTool", "streams"),
    model=asking("ask_solver", "input"),
    names=["chair", "solver", "solver", "chair"],
    direct=False,
)(program)


def handing_over(request: Json) -> str | Json:
    if "multiply" not in offered(request):
        return call("transfer_to_solver")
    done = [message for message in request["messages"] if message["role"] == "tool"]
    return calculator(request) if len(done) > 1 else call("multiply", number=1, a=6, b=7)


test_agents_that_hand_over_are_selected_by_their_roles = keeps(
    Promise("handoff", handing_over, names=["chair", "solver", "solver"], direct=False), on=ways("handoff")
)(program)
