"""Generates `docs/reference/settings.md` from the package: `python -m tests.packaging.settings`.

Variables come from `env_var.py`, arguments from the docstring and the signature of `Trainer`, metrics from
`store/http/metrics.py`, names of spans and keys from `semconv.py`, exit codes from `exit_codes.py`.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import agentlightning as agl
from agentlightning import env_var, exit_codes, semconv
from agentlightning.store.http.metrics import exported_metrics
from agentlightning.trainer.registry import AlgorithmRegistry, ExecutionStrategyRegistry, TrackerRegistry

PAGE = Path(__file__).parents[2] / "docs/reference/settings.md"
SPAN_NAMES = {
    name: value
    for name, value in vars(semconv).items()
    if (name.startswith("AGL_") and isinstance(value, str)) or name in ("REQUEST_SPAN", "RAW_SPAN")
}
KEYS_OF_SPANS = ("STALE", "CHANGED_TEXTS", "HIDDEN_KEYS")
KEYS = (
    ("On the resource of a span", semconv.LightningResourceAttributes, ""),
    ("Written by emitters", semconv.LightningSpanAttributes, ""),
    ("For a reward", semconv.RewardAttributes, "agentlightning.reward.<i>."),
    ("For a link", semconv.LinkAttributes, "agentlightning.link.<i>."),
    ("For a model call, on `raw_gen_ai_request`", semconv.LightningCallAttributes, ""),
    ("On the span `agentlightning.spans_cut`", semconv.LightningCutAttributes, ""),
)


def short_names() -> Iterator[tuple[str, str, str]]:
    """Yield argument, short name and class of each component that the Trainer accepts by name."""
    registries = {"algorithm": AlgorithmRegistry, "strategy": ExecutionStrategyRegistry, "trackers": TrackerRegistry}
    for argument, registry in registries.items():
        yield from ((f"`{argument}`", f"`{name}`", f"`{path}`") for name, path in registry.items())


def meanings(owner: ModuleType | type, within: str | None = None) -> dict[str, str]:
    """Return the docstrings of the constants of a module, or of a class in it, by name."""
    body = ast.parse(inspect.getsource(owner)).body
    if within is not None:
        [body] = [node.body for node in body if isinstance(node, ast.ClassDef) and node.name == within]
    texts: dict[str, str] = {}
    for node, below in pairwise(body):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        match target, below:
            case ast.Name(id=name), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
            case _:
                pass
    return texts


def arguments(function: Callable[..., Any], text: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, default and description of each argument under `Args:` in a docstring."""
    explained: dict[str, str] = {}
    part = inspect.cleandoc(text).partition("Args:\n")[2].partition("\n\n")[0]
    for entry in re.split(r"\n    (?=\w)", "\n" + part):
        names, _, meaning = entry.strip().partition(":")
        explained |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    for name, parameter in inspect.signature(function).parameters.items():
        if name != "self":
            default = "" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
            yield name, default, explained[name]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *([re.sub(r"(?<!\.)\.$", "", cell.replace("|", "\\|")) for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def page() -> str:
    return "\n".join(sections())


def sections() -> Iterator[str]:
    yield """# Settings and names

This page lists all environment variables, arguments of the `Trainer`, metrics, names of spans and attributes, and exit
codes. It is generated from the package by `python -m tests.packaging.settings`. The options of commands are in
[Command line](cli.md).
"""
    yield "## Environment variables\n\nA bool is `1`, `true`, `yes` or `on`, or `0`, `false`, `no` or `off`.\n"
    ours = meanings(env_var, "LightningEnvVar")
    yield table(("Variable", "Description"), ((f"`{each.value}`", ours[each.name]) for each in env_var.LightningEnvVar))
    yield "### Variables of other projects\n\nThe package reads these variables, or sets them if they are unset.\n"
    yield table(("Variable", "Description"), code_first(env_var.FOREIGN_VARIABLES))
    yield """### Variables set for a program

A program that runs as an agent ([any program](../how-to/any-program.md)) gets these variables. Those of a model are set
only if the resources contain a model.
"""
    yield table(("Variable", "Description"), code_first(env_var.PROGRAM_VARIABLES))
    yield f"## Trainer\n\n`agl.Trainer(...)` {one_line(agl.Trainer)}\n"
    yield table(
        ("Argument", "Default", "Description"), code_first_of(arguments(agl.Trainer, agl.Trainer.__doc__ or ""))
    )
    yield "### Short names\n"
    yield table(("Argument", "Name", "Class"), short_names())
    yield """## Metrics

A store server exports the gauges at `/v1/prometheus`, and with `--tracker prometheus` also the counters and histograms.
Histograms are in seconds. Each is exported with the suffixes `_bucket`, `_count` and `_sum`. To monitor a run with
these metrics, see [Operate](../how-to/operate.md).
"""
    rows = ((f"`{m.name}`", m.kind, ", ".join(f"`{n}`" for n in m.labels), m.meaning) for m in exported_metrics())
    yield table(("Metric", "Kind", "Labels", "Description"), rows)
    yield "## Spans\n\n### Names\n\nFrameworks of agents also create spans with other names.\n"
    texts = meanings(semconv)
    yield table(("Span", "Description"), ((f"`{value}`", texts[name]) for name, value in SPAN_NAMES.items()))
    yield "### Attributes of this package\n"
    yield table(("Key", "Description"), [(f"`{getattr(semconv, name)}`", texts[name]) for name in KEYS_OF_SPANS])
    for title, group, before in KEYS:
        yield f"{title}:\n"
        docs = meanings(semconv, group.__name__)
        yield table(("Key", "Description"), ((f"`{before}{each.value}`", docs[each.name]) for each in members(group)))
    yield """### Attributes of other conventions

The gateway, tracers and client libraries write these keys of OpenTelemetry's conventions and of v0.3. `<i>` and `<j>`
count from 0. Adapters also read other keys ([frameworks](../how-to/frameworks/index.md)).
"""
    yield table(("Key", "Description"), code_first(semconv.CONVENTIONAL_KEYS))
    yield "## Exit codes\n"
    codes = meanings(exit_codes, "ExitCode")
    yield table(("Code", "Description"), ((str(each.value), codes[each.name]) for each in exit_codes.ExitCode))


def members(group: type[Enum]) -> list[Enum]:
    return list(group)


def code_first(rows: dict[str, str]) -> Iterator[tuple[str, str]]:
    return ((f"`{name}`", meaning) for name, meaning in rows.items())


def code_first_of(rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    return ((f"`{name}`", *rest) for name, *rest in rows)


def one_line(something: object) -> str:
    line = (inspect.getdoc(something) or "").partition("\n")[0]
    return line[0].lower() + line[1:]


if __name__ == "__main__":
    PAGE.write_text(page())
