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

import sys
from collections.abc import Sequence

from tests.frameworks.environments import ROOT, Group, run_chosen, run_tests


def examples(*, locked: bool = True) -> dict[str, Group]:
    """Return the examples and recipes that have an environment, by name; or those that could have one."""
    files = [*ROOT.glob("examples/*/requirements.txt"), *ROOT.glob("contrib/recipes/*/agl/requirements.txt")]
    groups = [Group(path.parent, prefix=".venv-examples", extras="[demo]") for path in files]
    named = {group.name: group for group in groups if not locked or (group.folder / "constraints.txt").exists()}
    return dict(sorted(named.items()))


def run(name: str, group: Group, arguments: Sequence[str]) -> bool:
    """Run the tests of an example in its environment; say whether all passed."""
    return run_tests(group, [f"tests/examples/test_{name}.py", *arguments], AGL_TEST_EXAMPLE=name)


def main(arguments: Sequence[str]) -> int:
    """Run examples, or do what the arguments request."""
    return run_chosen(arguments, "example", examples(), examples(locked=False), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
