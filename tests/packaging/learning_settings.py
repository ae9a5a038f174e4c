"""Generates `docs/algorithms/settings.md` from the settings: `python -m tests.packaging.learning_settings`.

`other_settings/<library>.names` has the settings of a library with their defaults, one a line: `name = default`.
`other_settings/<library>.ours` has what they are here: groups (`# Title`) of lines `names | ours | note`. A name may be
a pattern such as `critic.optim.*`; the exact line of a name counts before patterns, and the first of several patterns.
A setting of ours is a field of `GRPOSettings`, or has its owner before it (`PPO.lam`, `Trainer.trackers`): `OWNERS`.

`python -m tests.packaging.learning_settings trl` (or `verl`) writes the `.names` file from the installed version. The
files of prime-rl, which is not on PyPI, are written by hand.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import agentlightning as agl
from agentlightning.algorithm.grpo import GRPOArguments
from agentlightning.training.ppo_settings import PPOSettings
from agentlightning.training.settings import GRPOSettings
from agentlightning.training.sft_settings import SFTSettings
from tests.packaging.settings import meanings, table

PAGE = Path(__file__).parents[2] / "docs/algorithms/settings.md"
FOLDER = Path(__file__).parent / "other_settings"
LIBRARIES = {"trl": "TRL", "verl": "VERL", "prime_rl": "prime-rl"}

COMING: Final[frozenset[str]] = frozenset()
"""Settings that the files name and that the package does not have yet."""

_REQUIRED: Final = "required"
OWNERS: Final[dict[str, tuple[str, Callable[..., Any]]]] = {
    "": ("{}", GRPOSettings),
    "GRPO": ("{}", GRPOArguments),
    "PPO": ("agl.PPO({}=)", PPOSettings),
    "SFT": ("agl.SFT({}=)", SFTSettings),
    "Trainer": ("Trainer({}=)", agl.Trainer),
    "fit": ("fit({}=)", agl.Trainer.fit),
    "evaluate": ("evaluate({}=)", agl.Trainer.evaluate),
    "RolloutConfig": ("RolloutConfig({}=)", agl.RolloutConfig),
    "LLMProxy": ("LLMProxy({}=)", agl.LLMProxy),
    "TRL": ("agl.TRL({}=)", agl.TRL),
}
"""The prefixes of our names: how it is shown, and what has a field or argument of the name."""


@dataclass(frozen=True)
class Line:
    """What settings of another library are here."""

    group: str
    names: tuple[str, ...]
    ours: tuple[str, ...]
    note: str


# --- what is read ------------------------------------------------------------------------------------------------


@cache
def names_of(library: str) -> dict[str, str]:
    """Return the settings of a library with their defaults."""
    lines = (FOLDER / f"{library}.names").read_text().splitlines()
    return dict(line.split(" = ", 1) for line in lines if line and not line.startswith("#"))


def version_of(library: str) -> str:
    """Return the version of a library, as the first line of its file gives it."""
    return (FOLDER / f"{library}.names").read_text().partition("\n")[0].removeprefix("# ")


@cache
def lines_of(library: str) -> tuple[Line, ...]:
    """Return what the settings of a library are here, in the order of the file."""
    lines, group = list[Line](), ""
    for line in (FOLDER / f"{library}.ours").read_text().splitlines():
        if line.startswith("# "):
            group = line[2:]
        elif line:
            names, ours, note = (part.strip() for part in line.split("|"))
            lines.append(Line(group, tuple(names.split()), tuple(ours.split()), note))
    return tuple(lines)


@cache
def chosen(library: str) -> dict[str, tuple[Line, str]]:
    """Return the line of each setting of a library, and the name or pattern in it that matches."""
    exact = {name: (line, name) for line in lines_of(library) for name in line.names}
    patterns = [(name, line) for line in lines_of(library) for name in line.names if "*" in name]
    found = dict[str, tuple[Line, str]]()
    for name in names_of(library):
        of_patterns = ((line, pattern) for pattern, line in patterns if fnmatchcase(name, pattern))
        if entry := exact.get(name) or next(of_patterns, None):
            found[name] = entry
    return found


def installed(library: str) -> dict[str, str]:
    """Return the settings of the installed version of TRL or VERL with their defaults."""
    return {"trl": _installed_trl, "verl": _installed_verl}[library]()


def _installed_trl() -> dict[str, str]:
    from trl import GRPOConfig, GRPOTrainer

    arguments = inspect.signature(GRPOTrainer).parameters.items()
    fields = {f"GRPOTrainer.{name}": repr(one.default) for name, one in arguments}
    fields["GRPOTrainer.model"] = _REQUIRED
    for field in dataclasses.fields(GRPOConfig):
        made = field.default_factory() if callable(field.default_factory) else field.default
        fields[field.name] = repr(made)
    return fields


def _installed_verl() -> dict[str, str]:
    import yaml

    spec = importlib.util.find_spec("verl")  # imports nothing of it
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "trainer/config/_generated_ppo_trainer.yaml"
    leaves = dict(_leaves(yaml.safe_load(file.read_text())))
    kept = {name: value for name, value in leaves.items() if not any(fnmatchcase(name, one) for one in VERL_APART)}
    return {name.removeprefix("actor_rollout_ref."): value for name, value in kept.items()}


VERL_APART: Final = (
    *("*_target_", "*.profiler.*", "global_profiler.*", "*.turbo_config.*", "transfer_queue.*", "skip.*"),
    *("ray_kwargs.*", "reward_model.*", "custom_reward_function.*", "sandbox_fusion.*"),
)
"""Settings of VERL that are not about learning (class paths, profilers, transport), and older names of `reward.*`."""


def _leaves(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{before}{key}.")
            continue
        if other := re.match(r"\$\{(?:oc\.select:)?\.?([\w.]+)", str(value)):
            yield f"{before}{key}", f"as {other[1].removeprefix('actor_rollout_ref.')}"
        else:
            yield f"{before}{key}", repr(value)


# --- our settings ------------------------------------------------------------------------------------------------


def fields_of(cls: Callable[..., Any]) -> dict[str, str]:
    """Return the defaults of the fields of a dataclass, or of the arguments of a function, by name."""
    parameters = inspect.signature(cls).parameters.values()
    missing = inspect.Parameter.empty
    return {one.name: _REQUIRED if one.default is missing else _short(one.default) for one in parameters}


def _short(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) and value not in (0, 1) else repr(value)
    return "" if "factory" in text or "<" in text else text


def place(ours: str) -> tuple[str, str]:
    """Return the owner and the name of a setting of ours."""
    owner, _, name = ours.rpartition(".")
    return owner, name


def shown(ours: str) -> tuple[str, str]:
    """Return how a setting of ours is written, and its default."""
    owner, name = place(ours)
    if owner == "lora":
        return f'`lora={{"{name}": ...}}`', ""
    how, has = OWNERS[owner]
    default = fields_of(has).get(name, "") if owner in ("", "GRPO", "PPO", "SFT") else ""
    return f"`{how.format(name)}`", _code(default)


def exists(ours: str) -> bool:
    """Return whether the package has this setting."""
    owner, name = place(ours)
    return owner == "lora" or name in fields_of(OWNERS[owner or "GRPO"][1])


def alone() -> Iterator[tuple[str, str, str]]:
    """Yield name, default and description of each setting of ours without a counterpart in the other libraries."""
    compared = {ours for library in LIBRARIES for line in lines_of(library) for ours in line.ours} | {"lora"}
    of_grpo = fields_of(GRPOSettings)
    for owner, cls in {"": GRPOSettings, "PPO": PPOSettings, "SFT": SFTSettings}.items():
        own = [name for name in fields_of(cls) if not owner or name not in of_grpo]
        for name in own:
            ours = f"{owner}.{name}".removeprefix(".")
            if ours not in compared:
                yield *shown(ours), first_sentence(cls, name)


# --- the page ----------------------------------------------------------------------------------------------------


def rows(library: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the group and the cells of each row: one for a name, but one for a line with patterns or many names."""
    defaults, of_line = names_of(library), dict[Line, dict[str, list[str]]]()
    for name, (line, pattern) in chosen(library).items():
        of_line.setdefault(line, {}).setdefault(pattern, []).append(name)
    for line in lines_of(library):
        cells = [(_their_name(*one), defaults.get(one[0], "")) for one in of_line[line].items()]
        if len(cells) > (2 if line.ours else 1):
            cells = [(", ".join(name for name, _ in cells), "")]
        ours = [shown(one) for one in line.ours]
        here = ", ".join(name for name, _ in ours) or "none"
        own_default = ", ".join(default for _, default in ours if default)
        for name, default in cells:
            yield line.group, [name, _code(default), here, own_default, line.note]


def _their_name(pattern: str, matched: list[str]) -> str:
    return f"`{pattern}` ({len(matched)} settings)" if len(matched) > 1 else f"`{matched[0]}`"


def _code(default: str) -> str:
    if default == _REQUIRED or len(default) > 40:
        return default if default == _REQUIRED else ""
    return f"as `{default[3:]}`" if default.startswith("as ") else f"`{default}`" if default else ""


def differing() -> Iterator[list[str]]:
    """Yield TRL's settings that have the same name here (without `vllm_`) and another default."""
    ours = fields_of(GRPOSettings)
    for name, (line, _) in chosen("trl").items():
        theirs, own = names_of("trl")[name], ours.get(line.ours[0], "") if line.ours else ""
        if own and line.ours in ((name,), (name.removeprefix("vllm_"),)) and not _equal(theirs, own):
            yield [f"`{name}`", _code(theirs), _code(own), line.note]


def _equal(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def first_sentence(cls: type, name: str) -> str:
    """Return the first sentence of the description of a setting."""
    text = next(texts[name] for texts in map(_meanings, cls.__mro__) if name in texts)
    return re.split(r"(?<=[.;]) (?=[A-Z0-9`\[])", text)[0].rstrip(".;")


@cache
def _meanings(cls: type) -> dict[str, str]:
    module = sys.modules[cls.__module__]
    return meanings(module, cls.__name__) if cls.__module__.startswith("agentlightning") else {}


def page() -> str:
    return "\n".join(sections())


def sections() -> Iterator[str]:
    yield (FOLDER / "introduction.md").read_text()
    yield "### Defaults that differ\n\nThese settings of TRL have the same name here and another default:\n"
    yield table(("Setting of TRL", "Default in TRL", "Default here", "Difference in meaning"), differing())
    for library, title in LIBRARIES.items():
        yield f"## {title}\n\n{(FOLDER / f'{library}.md').read_text()}"
        head = (title, "Default", "Here", "Default here", "Difference, or reason and alternative")
        for group, of_group in groupby(rows(library), key=lambda row: row[0]):
            yield f"### {title}: {group}\n"
            yield table(head, (cells for _, cells in of_group))
    yield "## Only here\n\nThese settings have no counterpart in the tables above.\n"
    yield table(("Setting", "Default", "Description"), alone())


if __name__ == "__main__":
    for library in sys.argv[1:]:
        text = "".join(f"{name} = {default}\n" for name, default in installed(library).items())
        (FOLDER / f"{library}.names").write_text(f"# {version_of(library)}\n{text}")
    if not sys.argv[1:]:
        PAGE.write_text(page())
