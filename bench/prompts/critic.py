"""The scripted critic: an OpenAI-compatible server in a separate process that only proposes what it reads in failures.

It knows two ways to improve a prompt, but no task, no label and no prompt. A failed task with a text answer becomes an
example: a turn in the form of the prompt's question, and the expected answer. A failed task with a requirement that the
prompt does not name becomes a rule that names it. So all proposals come from the request or the prompt in it. It
answers APO's requests for a critique and for an edit, and the reflection of GEPA.

    python -m bench.prompts.critic SEED     prints its port and serves until its standard input ends
"""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from string import Formatter
from typing import Any, Final, cast

MOST_EXAMPLES: Final = 10
_BLOCK: Final = re.compile(r"(?=<rollout |<trace |^# Example \d+)", re.MULTILINE)
_SCORE: Final = re.compile(r"(?:reward|score)(?: is|\W)\W{0,3}([01](?:\.\d+)?)", re.IGNORECASE)
_TEMPLATE: Final = re.compile(r"<template>\n(.*?)\n</template>|```[^\n]*\n(.*?)\n```", re.DOTALL)
_CRITIQUE: Final = re.compile(r"<critique>\n(.*?)\n</critique>", re.DOTALL)
_ADD: Final = re.compile(r'^- Add: (".*")$', re.MULTILINE)
_USER: Final = re.compile(r"^User: ?", re.MULTILINE)
_EXAMPLE: Final = re.compile(r"^User: ?(?:(?!^User: ).)*?^Assistant: ?[^\n]*\n?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Case:
    """A task in the request, and the agent's reward."""

    task: dict[str, Any]
    reward: float


def answer(text: str, seed: int) -> str:
    """Return the critic's reply to a request; deterministic."""
    rng = random.Random(f"{seed} {text}")
    match = _TEMPLATE.search(text)
    if match is None:
        return "I see no prompt in this request."
    template = match[1] if match[1] is not None else match[2]
    if (critique := _CRITIQUE.search(text)) is not None:
        additions = [json.loads(each) for each in _ADD.findall(critique[1])]
        return edited(template, additions[:1] if "exactly one" in text else additions, rng)
    additions = lessons(template, list(cases_in(text)))
    if match[1] is None:  # a reflection: the new prompt in a fence
        return f"```\n{edited(template, additions, rng)}\n```"
    return "Critique:\n" + "\n".join(f"- Add: {json.dumps(each, ensure_ascii=False)}" for each in additions)


def cases_in(text: str) -> Iterator[Case]:
    """Yield the tasks in the request's JSON, each with the reward beside it."""
    decoder = json.JSONDecoder()
    for block in _BLOCK.split(text)[1:]:
        score = _SCORE.search(block)
        for brace in re.finditer(r"\{", block):
            try:
                task, _ = decoder.raw_decode(block, brace.start())
            except ValueError:
                continue
            if isinstance(task, dict) and score is not None:
                yield Case(cast("dict[str, Any]", task), float(score[1]))
            break


def lessons(template: str, cases: Sequence[Case]) -> list[str]:
    """Return additions to the prompt for the failed tasks; the most frequent need comes first."""
    gaps = {name for _, name, _, _ in Formatter().parse(template) if name}
    examples, rules = list[str](), Counter[str]()
    for case in cases:
        if case.reward >= 1:
            continue
        for field, value in case.task.items():
            if value is True and field not in template.casefold():
                rules[f"If {field} is asked for, the room must have it."] += 1
            gap = next(iter(gaps), "")
            text = case.task.get(gap)
            if isinstance(value, str) and isinstance(text, str) and field not in gaps:
                question = _pattern(template).replace(f"{{{gap}}}", text)
                example = f"User: {question}\nAssistant: {value}\n"
                if example not in template:
                    examples.append(example)
    return [rule for rule, _ in rules.most_common()] + examples


def edited(template: str, additions: Sequence[str], rng: random.Random) -> str:
    """Return the prompt with the additions: rules at its end, examples before the last turn, up to `MOST_EXAMPLES`."""
    rules = [each for each in additions if not each.startswith("User: ")]
    new = [each for each in additions if each.startswith("User: ")]
    if not new:
        return "\n".join([template, *rules])
    pattern, head = _pattern(template), _USER.split(template)[0] if _USER.search(template) else ""
    examples = [*(each if each.endswith("\n") else f"{each}\n" for each in _EXAMPLE.findall(template)), *new]
    while len(examples) > MOST_EXAMPLES:  # remove one with the most frequent answer
        answers = Counter(map(_answer, examples))
        most = max(answers.values())
        examples.remove(rng.choice([each for each in examples if answers[_answer(each)] == most]))
    if rng.random() < 0.5:
        rng.shuffle(examples)
    return head + "".join(examples) + f"User: {pattern}"


def _pattern(template: str) -> str:
    """Return the form of the prompt's question: its last turn, or all of a prompt without turns."""
    return _USER.split(template)[-1].strip()


def _answer(example: str) -> str:
    return example.rpartition("Assistant:")[2].strip()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seed = 0

    def do_POST(self) -> None:
        request: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = "\n".join(str(message["content"]) for message in request["messages"])
        content = answer(text, self.seed)
        message = {"role": "assistant", "content": content}
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(content.split())}
        reply = {
            "id": "critique",
            "object": "chat.completion",
            "created": 0,
            "model": request.get("model", "critic"),
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {**usage, "total_tokens": sum(usage.values())},
        }
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    """Serve until standard input ends."""
    _Handler.seed = int(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
