"""The OpenAI Agents SDK for JavaScript: tools, streams, an agent as a tool and handoffs, each agent with its role."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.engine import Json, calculator, call, last, offered, said
from tests.frameworks.harness import run_agent
from tests.frameworks.node.node_programs import needs_node, node_agent, programs

pytestmark = needs_node

__all__ = ["programs"]  # a fixture

SAID = ["It is 42, no doubt.", "It is 72, no doubt."]
SOLVER = ("solver", "You are solver.")
CHAIR = ("chair", "You are chair.")

each = pytest.mark.parametrize("dialect", ["chat", "responses"])


def model(request: Json) -> str | Json:
    """The chair asks the solver or hands over to it."""
    if "multiply" in offered(request):
        return calculator(request)
    if last(request)["role"] == "tool":
        return f"The solver says: {said(last(request))}"
    if "ask_solver" in offered(request):
        return call("ask_solver", input=said(last(request)))
    return call("transfer_to_solver")


@each
def test_a_tool_loop_is_one_row(programs: Path, dialect: str) -> None:
    results = run_agent(node_agent(programs / "agents-js.mjs", "toolLoop", dialect), direct=False)
    assert [one.output for one in results] == SAID
    assert [[len(row.call_ids) for row in one.record.samples] for one in results] == [[2], [2]]


@each
@pytest.mark.parametrize("agent", ["agentAsTool", "streams"])
def test_an_agent_and_the_one_that_is_its_tool_are_selected_by_their_roles(
    programs: Path, agent: str, dialect: str
) -> None:
    results = run_agent(node_agent(programs / "agents-js.mjs", agent, dialect), model, direct=False)
    assert [one.output for one in results] == [f"The solver says: {answer}" for answer in SAID]
    for one in results:
        assert one.agents() == [CHAIR, SOLVER, SOLVER, CHAIR]
        assert one.agents("^solver$") == [SOLVER] * 2
        assert one.agents("^chair$") == [CHAIR] * 2


@each
def test_agents_that_hand_over_are_selected_by_their_roles(programs: Path, dialect: str) -> None:
    for one in run_agent(node_agent(programs / "agents-js.mjs", "handoff", dialect), calc_after_handoff, direct=False):
        assert one.agents("^chair$") == [CHAIR]
        assert one.agents("^solver$") == [SOLVER] * 2


def calc_after_handoff(request: Json) -> str | Json:
    if "multiply" not in offered(request):
        return call("transfer_to_solver")
    done = [message for message in request["messages"] if message["role"] == "tool"]
    return calculator(request) if len(done) > 1 else call("multiply", number=1, a=6, b=7)
