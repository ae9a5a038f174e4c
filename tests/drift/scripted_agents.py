"""Scripted agents that change a conversation: each makes its calls and notes which call each one continues,
and what it changed of the conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.drift.engine import Engine, Json
from tests.drift.families import WORDS


@dataclass(frozen=True)
class Step:
    """The agent's action between two of its calls."""

    continues: int | None
    """The call that it continues; None begins a conversation."""
    change: str | None = None
    """The change to the conversation; None where the agent sent it back unchanged."""
    taken: str = "branch"
    """The cause where another call has continued from there already, token for token."""


@dataclass
class ScriptedAgent:
    """One attempt: the engine that answers it, and the steps of its agent."""

    engine: Engine
    random: Random
    steps: list[Step] = field(default_factory=list[Step])

    def ask(
        self,
        messages: Sequence[Json],
        *,
        continues: int | None = None,
        change: str | None = None,
        effect: str = "branch",
        say: str | None = None,
        cut_after: int | None = None,
    ) -> list[Json]:
        """Make a call and return the conversation with its answer."""
        self.steps.append(Step(continues, change, effect))
        reply = self.engine.ask(messages, say=self.words() if say is None else say, cut_after=cut_after)
        return [*messages, reply]

    def words(self) -> str:
        """Return a few words out of the corpus, in any script."""
        text = self.random.choice(WORDS)
        start = self.random.randrange(max(1, len(text) // 2))
        return text[start : start + self.random.randint(3, 24)] or text[:3]

    def user(self) -> Json:
        return {"role": "user", "content": f"{self.words()} ({len(self.steps)})"}

    def tool(self, call: Json | None = None) -> Json:
        id = (call or {}).get("tool_calls", [{"id": "t"}])[0]["id"]
        return {"role": "tool", "tool_call_id": id, "content": f"result {self.random.randint(0, 999)}"}

    def say_call(self) -> str:
        """Return a tool call as the policy would write it, spaced in its own way."""
        gap = self.random.choice(["", " "])
        query = self.random.choice(["weather", "town", "result"])
        return (
            f'<tool_call>{{"name":{gap}"search", "arguments": {{"query":{gap}"{query}",{gap}"limit":3}}}}</tool_call>'
        )


SYSTEM: Json = {"role": "system", "content": "you are a helpful agent; be brief."}


def talks(agent: ScriptedAgent) -> None:
    """A conversation of four turns."""
    messages = agent.ask([SYSTEM, agent.user()])
    for turn in range(3):
        messages = agent.ask([*messages, agent.user()], continues=turn)


def thinks(agent: ScriptedAgent) -> None:
    """Each answer has thoughts before it."""
    messages, opened = [SYSTEM], "" if agent.engine.template == "opens a thought" else "<think>"
    for turn in range(3):
        say = f"{opened}{agent.words()}</think>{agent.words()}"
        messages = agent.ask([*messages, agent.user()], continues=turn - 1 if turn else None, say=say)


def uses_tools(agent: ScriptedAgent) -> None:
    """Tool calls, the results of tools, and an answer."""
    messages = agent.ask([SYSTEM, agent.user()], say=agent.say_call())
    messages = agent.ask([*messages, agent.tool(messages[-1])], continues=0, say=agent.say_call())
    agent.ask([*messages, agent.tool(messages[-1])], continues=1)


def edits(agent: ScriptedAgent) -> None:
    """Earlier messages are changed: a question, an answer, a system message that tells the time; one is put in."""
    messages = agent.ask([SYSTEM, agent.user()])
    messages = agent.ask([*messages, agent.user()], continues=0)
    system, question, answer, *others = messages
    changed_question = {**question, "content": f"{question['content']}, or the other way round"}
    agent.ask([system, changed_question, answer, *others, agent.user()], continues=1, change="edit")
    answered = {**answer, "content": "an answer that nobody gave"}
    agent.ask([system, question, answered, *others, agent.user()], continues=1, change="edit")
    clock = {**system, "content": f"{system['content']} It is {agent.random.randint(10, 23)}:05."}
    agent.ask([clock, *messages[1:], agent.user()], continues=1, change="edit")
    note = {"role": "user", "content": "a note that was not there before"}
    agent.ask([system, question, note, answer, *others, agent.user()], continues=1, change="edit")


def forgets(agent: ScriptedAgent) -> None:
    """The context grows too long: old turns are left out, a long message is cut."""
    long = {"role": "user", "content": "look at the weather in Paris and in London, " * 3 + "then tell me"}
    messages = agent.ask([SYSTEM, long])
    messages = agent.ask([*messages, agent.user()], continues=0)
    messages = agent.ask([*messages, agent.user()], continues=1)
    agent.ask([SYSTEM, *messages[3:], agent.user()], continues=2, change="truncation")
    cut = {**long, "content": long["content"][:70]}
    agent.ask([SYSTEM, cut, *messages[2:], agent.user()], continues=2, change="truncation")


def repeats_a_tool(agent: ScriptedAgent) -> None:
    """A tool is asked again and its new result put in the old one's place."""
    messages = agent.ask([SYSTEM, agent.user()], say=agent.say_call())
    messages = agent.ask([*messages, agent.tool(messages[-1])], continues=0)
    again = {**messages[3], "content": "another result: nothing was found anywhere"}
    agent.ask([*messages[:3], again, messages[4], agent.user()], continues=1, change="tool_result_changed")
    other = {**messages[3], "content": "a third result"}
    agent.ask([*messages[:3], other], continues=0, effect="tool_result_changed")


def shares_work(agent: ScriptedAgent) -> None:
    """A second agent with instructions of its own works in between; the first one goes on."""
    messages = agent.ask([SYSTEM, agent.user()])
    critic: Json = {"role": "system", "content": "Search for mistakes, nothing else! 0123456789"}
    theirs = agent.ask([critic, agent.user()], change="other_agent")
    messages = agent.ask([*messages, agent.user()], continues=0)
    agent.ask([*theirs, agent.user()], continues=1)
    agent.ask([*messages, agent.user()], continues=2)
    agent.ask([SYSTEM, agent.user()], change="other_agent")


def tries_several(agent: ScriptedAgent) -> None:
    """Parallel samples of one prompt, and several ways on from one turn."""
    question = [SYSTEM, agent.user()]
    messages = agent.ask(question)
    agent.ask(question, change="repeated_prompt")
    for _ in range(3):
        agent.ask([*messages, agent.user()], continues=0)


def is_cut_off(agent: ScriptedAgent) -> None:
    """Answers end at a limit, perhaps in the middle of a character."""
    messages = [SYSTEM]
    for turn in range(3):
        cut = agent.random.randint(1, 4)
        messages = agent.ask(
            [*messages, agent.user()], continues=turn - 1 if turn else None, say="👩\u200d👧 café", cut_after=cut
        )


BEHAVIOURS: dict[str, Callable[[ScriptedAgent], Any]] = {
    behave.__name__: behave
    for behave in (talks, thinks, uses_tools, edits, forgets, repeats_a_tool, shares_work, tries_several, is_cut_off)
}
