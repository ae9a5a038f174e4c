"""What a model says to each harness: the work on one task, a sub-agent, and a context that becomes too long.

A script returns the text that the model samples. In the spelling `template` it is exactly the text that the template
writes for such a message; in the spelling `own`, JSON is correct but formatted in other ways, as models do at times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tests.environments.harbor_agent.chat_engine import TemplateName
from tests.frameworks.engine import Json, offered, said

Spelling = Literal["template", "own"]
Plot = Literal["work", "agent", "long"]
Call = tuple[str, Json]

OLD = "    return a + b"
NEW = """    '''Say "a times b": 6 × 7 = 42, which is 四十二 👍.'''

    if a is None:
        return "n/a\\n"
    return a * b"""
LONG = "seq -f 'line %g of a long output, with \"quotes\" and é' 300; cat calc.py"
BIG = "seq -f 'line %g of a very long output' 1300"
FAILING = "python3 -c 'import no_such_module'"
CHECK = "python3 -c \"import calc; print('It is', calc.mul(6, 7))\""
END_OF_MINI = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SUBTASK = "SUBTASK: say what calc.py contains."


_SUMMARIES = ("Do NOT call any tools", "CONTEXT CHECKPOINT COMPACTION", "First, reason in your scratchpad")
_IN_FOREGROUND = {"run_in_background": False}


@dataclass(frozen=True)
class Tools:
    """The calls of one harness's tools."""

    run: Callable[[str], Call]
    edit: Callable[[str, str], Call]
    read: Call
    agent: Call | None = None


def _patched(old: str, new: str) -> str:
    lines = [*(f"-{line}" for line in old.split("\n")), *(f"+{line}" for line in new.split("\n"))]
    patch = "\n".join(["*** Begin Patch", "*** Update File: calc.py", "@@", *lines, "*** End Patch"])
    return f"apply_patch <<'EOF'\n{patch}\nEOF"


def _replaced(old: str, new: str) -> str:
    change = f"text = open('calc.py').read().replace({old!r}, {new!r})"
    return f"python3 - <<'EOF'\n{change}\nopen('calc.py', 'w').write(text)\nEOF"


TOOLS = {
    "mini-swe-agent": Tools(
        lambda command: ("bash", {"command": command}),
        lambda old, new: ("bash", {"command": _replaced(old, new)}),
        ("bash", {"command": "head -50 calc.py"}),
    ),
    "pi": Tools(
        lambda command: ("bash", {"command": command}),
        lambda old, new: ("edit", {"path": "calc.py", "edits": [{"oldText": old, "newText": new}]}),
        ("read", {"path": "calc.py"}),
    ),
    "opencode": Tools(
        lambda command: ("bash", {"command": command, "description": "Run a command"}),
        lambda old, new: ("edit", {"filePath": "/app/calc.py", "oldString": old, "newString": new}),
        ("read", {"filePath": "/app/calc.py"}),
        ("task", {"description": "Look at it", "prompt": SUBTASK, "subagent_type": "general"}),
    ),
    "qwen-coder": Tools(
        lambda command: ("run_shell_command", {"command": command, "is_background": False}),
        lambda old, new: ("edit", {"file_path": "/app/calc.py", "old_string": old, "new_string": new}),
        ("read_file", {"file_path": "/app/calc.py"}),
        ("agent", {"description": "Look at it", "prompt": SUBTASK, "subagent_type": "general-purpose"}),
    ),
    "claude-code": Tools(
        lambda command: ("Bash", {"command": command, "description": "Run a command"}),
        lambda old, new: ("Edit", {"file_path": "/app/calc.py", "old_string": old, "new_string": new}),
        ("Read", {"file_path": "/app/calc.py"}),
        (
            "Agent",
            {"description": "Look at it", "prompt": SUBTASK, "subagent_type": "general-purpose", **_IN_FOREGROUND},
        ),
    ),
    "codex": Tools(
        lambda command: ("exec_command", {"cmd": command}),
        lambda old, new: ("exec_command", {"cmd": _patched(old, new)}),
        ("exec_command", {"cmd": "head -50 calc.py"}),
        ("multi_agent_v1__spawn_agent", {"message": SUBTASK}),
    ),
}


class Script:
    """A model for one attempt. Its calls without tools, and those of helpers with tools, get a short text."""

    def __init__(
        self, harness: str, template: TemplateName, spelling: Spelling = "template", plot: Plot = "work"
    ) -> None:
        self._tools, self._thinks, self._spelling = TOOLS[harness], template == "qwen3", spelling
        self._ends_with_call, self._waits = harness == "mini-swe-agent", harness == "codex"
        self._work = {"work": self._alone, "agent": self._with_agent, "long": self._long}[plot]()
        self._subtask = self._of_subtask()
        self.requests: list[Json] = []

    def __call__(self, request: Json) -> str:
        self.requests.append(request)
        if not offered(request) or _is_helper(request):
            return self._text("<summary>The function adds, and must multiply.</summary>")
        return next(self._subtask if _is_subtask(request) else self._work, self._text("Done."))

    def _alone(self) -> Iterator[str]:
        tools = self._tools
        yield self._turn("I'll look at the file first: it's short.", tools.run(LONG))
        yield self._turn("", tools.run(FAILING))
        yield self._turn("", tools.read, tools.run("ls -la"))
        yield self._turn("", tools.edit(OLD, NEW))
        yield self._turn("", tools.run(CHECK))
        yield self._last()

    def _with_agent(self) -> Iterator[str]:
        tools = self._tools
        assert tools.agent is not None
        yield self._turn("", tools.run("cat calc.py"))
        yield self._turn("", tools.agent)
        if self._waits:
            agent = json.loads(said(self.requests[-1]["messages"][-1]))["agent_id"]
            yield self._turn("", ("multi_agent_v1__wait_agent", {"targets": [agent]}))
        yield self._turn("", tools.run("ls"))
        yield self._last()

    def _long(self) -> Iterator[str]:
        for command in (BIG, BIG, BIG, "ls", "ls -la"):
            yield self._turn("", self._tools.run(command))
        yield self._last()

    def _of_subtask(self) -> Iterator[str]:
        yield self._turn("", self._tools.run("wc -l calc.py"))
        yield self._text("It contains mul.")

    def _last(self) -> str:
        if self._ends_with_call:
            return self._turn("", self._tools.run(END_OF_MINI))
        return self._text("Done: `mul` multiplies, 6 × 7 = 42.")

    def _text(self, text: str) -> str:
        return f"{self._thought()}{text}"

    def _turn(self, text: str, *calls: Call) -> str:
        return self._thought() + "\n".join([*([text] if text else []), *(self._spelled(each) for each in calls)])

    def _thought(self) -> str:
        return "<think>\nLet me see, what's next?\n\nI'd go on.\n</think>\n\n" if self._thinks else ""

    def _spelled(self, call: Call) -> str:
        name, arguments = call
        if self._spelling == "template":
            body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        else:
            body = json.dumps({"arguments": arguments, "name": name}, separators=(",", ":"))
        return f"<tool_call>\n{body}\n</tool_call>"


def _is_helper(request: Json) -> bool:
    first, last = (said(request["messages"][at]) for at in (0, -1))
    return "managed memory extraction subagent" in first or any(text in last for text in _SUMMARIES)


def _is_subtask(request: Json) -> bool:
    return any(SUBTASK in said(message) for message in request["messages"] if message["role"] == "user")
