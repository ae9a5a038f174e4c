"""Make the environments of examples that have one, and run their tests there: part of `make test-examples`.

An example whose folder has `constraints.txt` beside `requirements.txt` has an environment of its own: the first file
holds the exact versions of all that is in it, the second what the example asks for. Of a recipe (`contrib/recipes/`)
they are in its folder `agl/`, and it counts as an example here. The environment is
`.venv-examples-<name>` in the root of the repository, with this package and its extra `demo`; it is made again when one
of these files or `pyproject.toml` changes. For Node see `tests/frameworks/environments.py`, which this builds on.

    python -m tests.examples.environments                    every example that has one
    python -m tests.examples.environments calc_x             this one
    python -m tests.examples.environments calc_x -- -k small what follows goes to pytest
    python -m tests.examples.environments --in-turn 1        one, chosen by the hash of the commit
    python -m tests.examples.environments --lock calc_x      write the versions of an example anew
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.frameworks.environments import QUIET, ROOT, Group, commit, in_turn, lock, prepare


def examples(*, locked: bool = True) -> dict[str, Group]:
    """Return the examples and recipes that have an environment, by name; or those that could have one."""
    found = [*ROOT.glob("examples/*/requirements.txt"), *ROOT.glob("contrib/recipes/*/agl/requirements.txt")]
    groups = [Group(path.parent, prefix=".venv-examples", extras="[demo]") for path in found]
    named = {group.name: group for group in groups if not locked or (group.folder / "constraints.txt").exists()}
    return dict(sorted(named.items()))


def run(group: Group, arguments: Sequence[str]) -> bool:
    """Run the tests of an example in its environment; say whether all passed."""
    told = {**QUIET, "AGL_TEST_EXAMPLE": group.name, "AGL_TEST_NODE_MODULES": str(group.environment / "node_modules")}
    command = [
        str(prepare(group)),
        "-m",
        "pytest",
        "-p",
        "tests.unsteady",
        f"tests/examples/test_{group.name}.py",
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **told}, check=False).returncode == 0


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments name and print what passed, with seconds."""
    own, pytest_arguments = list(arguments), []
    if "--" in own:
        own, pytest_arguments = own[: own.index("--")], own[own.index("--") + 1 :]
    known = examples()
    parser = argparse.ArgumentParser(prog="python -m tests.examples.environments")
    parser.add_argument("names", nargs="*", metavar="example", help=f"default: all of {', '.join(known)}")
    parser.add_argument("--in-turn", type=int, metavar="N", help="run N of them, chosen by the hash of the commit")
    parser.add_argument("--lock", metavar="EXAMPLE", help="find the versions of an example anew")
    given = parser.parse_args(own)
    if given.lock:
        if not (group := examples(locked=False).get(given.lock)):
            parser.error(f"no example or recipe {given.lock} has a requirements.txt")
        lock(group)
        return 0
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"no environment of {', '.join(unknown)}; there are those of {', '.join(known) or 'no example'}")
    chosen: Sequence[str] = given.names or list(known)
    if given.in_turn:
        chosen = in_turn(list(known), given.in_turn, commit())
        left = ", ".join(name for name in known if name not in chosen)
        print(f"This commit runs {', '.join(chosen)}. Not run this time: {left}; make test-examples runs all.")
    lines: list[str] = []
    failed = 0
    for name in chosen:
        print(f"--- {name}", flush=True)
        if known[name].missing:
            failed += name in given.names
            lines.append(f"{name:<22}NOT RUN, not installed: {known[name].missing}")
            continue
        began = time.monotonic()
        passed = run(known[name], pytest_arguments)
        failed += not passed
        lines.append(f"{name:<22}{'passed' if passed else 'FAILED'}  {time.monotonic() - began:4.0f} s")
    print("\n".join(lines))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
