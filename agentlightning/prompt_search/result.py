"""`PromptResult`: what a search over prompts returns."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from agentlightning.chat.bill import Bill
from agentlightning.field_help import explain_fields
from agentlightning.private_files import open_private
from agentlightning.prompt_search.history import PromptVersion
from agentlightning.terminal import one_line
from agentlightning.types import NamedResources, PromptTemplate


@explain_fields
@dataclass
class PromptResult:
    """The best prompts that were found, and every version on the way. Prints as a table."""

    best: PromptVersion
    """The seed if nothing was better."""
    history: list[PromptVersion]
    """Every version in the order in which they were made, refused ones too; the seed is the first."""
    best_resources: NamedResources = field(default_factory=dict, repr=False)
    """All initial resources with the best prompts in the place of the seed's, as `Trainer.evaluate` takes them."""
    bill: Bill = field(default_factory=Bill)
    """What critics and editors have used, in all starts of the run."""
    rollouts: int = 0
    """Rollouts that this start of the run has enqueued."""
    stop_reason: str = "finished"
    """`finished`, or what ended the search early."""
    p_value: float | None = None
    """Of the exact sign test of the best against the seed on the validation tasks, times the versions that it was
    chosen from; None if they were not compared."""
    seconds: float = 0.0
    """From the beginning of this start to its end."""

    @property
    def seed(self) -> PromptVersion:
        """The prompts that the search began with."""
        return self.history[0]

    @property
    def best_templates(self) -> dict[str, PromptTemplate]:
        """The best prompts by the names of their resources."""
        return self.best.templates

    @property
    def best_prompt(self) -> PromptTemplate:
        """The template in which the best version differs from its parent: the prompt, where there is only one."""
        return self.best.prompt_template

    def diff(self) -> str:
        """Return what the best prompts change of the seed's, as a unified diff; empty if nothing."""
        lines = list[str]()
        for name, template in self.best.templates.items():
            texts = (self.seed.templates[name].template.splitlines(), template.template.splitlines())
            names = f"{name} ({self.seed.version})", f"{name} ({self.best.version})"
            lines += difflib.unified_diff(*texts, *names, lineterm="")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return everything but the resources, which may hold keys, as JSON data."""
        return {
            "best": self.best.version,
            "stop_reason": self.stop_reason,
            "p_value": self.p_value,
            "rollouts": self.rollouts,
            "seconds": self.seconds,
            "bill": self.bill.as_json(),
            "diff": self.diff(),
            "versions": [version.as_json() for version in self.history],
        }

    def save(self, path: str | Path) -> None:
        """Write it as JSON, readable by its owner alone."""
        with open_private(path, "w") as file:
            json.dump(self.as_json(), file, indent=2, ensure_ascii=False)

    @override
    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("version", "round", "parent", "score", "interval", "tasks", "failed", "state", "prompt")
        ]
        for each in self.history:
            score = "" if each.score is None else f"{each.score:.3f}"
            bounds = "" if each.interval is None else "{:.2f}..{:.2f}".format(*each.interval)
            counts = (str(each.tasks), str(each.failures)) if each.tasks else ("", "")
            state = "best" if each is self.best else each.state
            text = one_line(" ".join(each.prompt_template.template.split()))[:48]
            rows.append((each.version, str(each.round), each.parent or "", score, bounds, *counts, state, text))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        change = "no version was better than the seed"
        if self.best is not self.seed:
            before, after = ("?" if s is None else f"{s:.3f}" for s in (self.seed.score, self.best.score))
            p = "" if self.p_value is None else f" (sign test p = {self.p_value:.3g})"
            change = f"{self.seed.version} {before} -> {self.best.version} {after}{p}"
        return f"{table}\n{change}; {self.rollouts} rollouts; {self.bill}; {self.stop_reason}"
