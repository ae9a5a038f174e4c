"""The commands that the READMEs of examples/ show, each with the output that it is said to have."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import agentlightning as agl
from tests.frameworks.engine import Engine, Json
from tests.stubs.processes import clean_environment, run_program

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RECIPES = ROOT / "contrib/recipes"
_SHOWN = re.compile(r"^```bash\n([^`]*?)\n```\n\n```text\n(.*?)^```", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"(-?\d+\.\d+)")


@dataclass(frozen=True)
class Shown:
    """One command of a README."""

    name: str
    command: str
    output: str


def shown(*examples: str) -> list[Shown]:
    """Return the commands, in their order, of those examples that show their output."""
    commands: list[Shown] = []
    for name in examples:
        blocks: list[tuple[str, str]] = _SHOWN.findall((EXAMPLES / name / "README.md").read_text())
        assert blocks, f"examples/{name}/README.md shows no command with its output"
        commands.extend(Shown(f"{name}-{number}", *block) for number, block in enumerate(blocks))
    return commands


def run(command: str, folder: Path = ROOT, *, timeout: float = 110, **environment: str) -> str:
    """Run a command that begins with `python`, without settings of this machine; return its standard output."""
    program, *arguments = shlex.split(command)
    assert program == "python", command
    whole = {**clean_environment(), **environment}
    return run_program("python", *arguments, folder=folder, timeout=timeout, environment=whole).stdout


def curve(printed: str) -> dict[int, int]:
    """Return updates and the percentage of what was achieved after them, out of the table of a program."""
    table = re.split("updates  (?:solved|answered|found|met in full)", printed, maxsplit=1)[1]
    return {int(updates): int(share) for updates, share in re.findall(r"^ +(\d+) +(\d+)%", table, re.MULTILINE)}


def check_untaught(printed: str) -> None:
    """A model that earns nothing learns nothing: no update was taken."""
    assert curve(printed) == {0: 0}
    assert "equal_rewards 128" in printed


def check_learnt(command: str, timeout: float, *, at_most: int, gain: int = 0, at_least: int = 0) -> None:
    """Run a training whose share is at most so large at first, and at the end so large or larger by so much."""
    shares = curve(run(command, timeout=timeout))
    assert shares[0] <= at_most
    assert shares[max(shares)] >= max(shares[0] + gain, at_least)


def play(agent: Callable[[agl.LLM], float], model: Callable[[Json], str | Json]) -> tuple[float, list[Json]]:
    """Run an agent on a scripted model and return its reward and what the model was asked."""
    with Engine(model) as engine:
        sampling = {"temperature": 0.5, "max_tokens": 24}
        reward = agent(agl.LLM(endpoint=engine.base_url, model="policy", sampling_parameters=sampling))
        assert engine.trouble == []
        return reward, [exchange.request for exchange in engine.calls]


def same(printed: str, expected: str, *, tolerance: float = 0.0) -> bool:
    """True if both say the same, but for spaces at ends of lines and for decimal numbers within the tolerance."""
    left, right = (_NUMBER.split("\n".join(map(str.rstrip, text.strip().splitlines()))) for text in (printed, expected))
    if left[::2] != right[::2]:
        return False
    return all(
        math.isclose(float(a), float(b), abs_tol=tolerance) for a, b in zip(left[1::2], right[1::2], strict=True)
    )
