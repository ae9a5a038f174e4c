"""Make the environments of the frameworks and run their tests: `make test-frameworks`.

A folder beside this file that has a `requirements.txt` is a group: frameworks whose packages fit into one environment.
It holds that file, the versions that were found to fit (`constraints.txt`), for Node a `package.json` with its lock
file, and `test_<framework>.py` for each framework. A `commands-<name>.txt` holds the versions of a program that fits
into no environment with others; it gets one of its own, within that of the group. No script of a Node package is run;
the script `link` of the `package.json` does what those of its commands would do. The environment is
`.venv-frameworks-<group>` in the root of the repository; it is made again when one of these files or `pyproject.toml`
changes. Packages come by uv and its cache.

    python -m tests.frameworks.environments                      every framework
    python -m tests.frameworks.environments dspy crewai          these
    python -m tests.frameworks.environments --in-turn 3          three, chosen by the hash of the commit
    python -m tests.frameworks.environments dspy -- -k stream    what follows goes to pytest
    python -m tests.frameworks.environments --lock openai2       write the versions of a group anew
    python -m tests.frameworks.environments --make .venv-x -- -r x.txt   an environment of another stage, as by pip

It needs the standard library only, since it runs before there is an environment.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
UV = ROOT / ".venv-frameworks-uv/bin/uv"
TESTING = HERE / "testing.txt"
"""Requirements of the tests of every group."""
QUIET = {
    "AGNO_TELEMETRY": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else its prices come from a network as it is imported
}
"""Variables that keep frameworks from reaching out on their own; the guide of each framework names them."""
PYTHON = "3.11"
"""The oldest Python that the package supports; `--lock` finds versions for it."""


@dataclass(frozen=True)
class Group:
    """Frameworks that share an environment.

    Attributes:
        prefix: of the environment's folder in the root of the repository.
        extras: of this package that are installed with it, such as `[demo]`.
    """

    folder: Path
    prefix: str = ".venv-frameworks"
    extras: str = ""

    @property
    def whole(self) -> Path:
        """The folder with its package.json; of a recipe the folder above its Python part."""
        return self.folder.parent if self.folder.name == "agl" else self.folder

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def environment(self) -> Path:
        return ROOT / f"{self.prefix}-{self.name}"

    @property
    def missing(self) -> str:
        """Return what the group needs and neither this machine nor pip has; "" for nothing."""
        commands = ("node", "npm") if (self.whole / "package.json").exists() else ()
        return ", ".join(name for name in commands if shutil.which(name) is None)

    @property
    def frameworks(self) -> list[str]:
        return sorted(path.stem.removeprefix("test_").replace("_", "-") for path in self.folder.glob("test_*.py"))

    def state(self) -> str:
        """Return a hash of everything that determines the environment."""
        files = [self.folder / name for name in ("requirements.txt", "constraints.txt")]
        files += [self.whole / name for name in ("package.json", "package-lock.json")]
        files = [path for path in files if path.exists()]
        files += sorted(self.folder.glob("commands-*.txt"))
        parts = [path.read_bytes() for path in (*files, TESTING, ROOT / "pyproject.toml")]
        return hashlib.sha256(b"\0".join([sys.version.encode(), *parts])).hexdigest()


def groups() -> list[Group]:
    return [Group(path.parent) for path in sorted(HERE.glob("*/requirements.txt"))]


def homes() -> dict[str, Group]:
    """Return each framework with its group; those of one group come after one another."""
    return {name: group for group in groups() for name in group.frameworks}


def in_turn(names: Sequence[str], count: int, commit: str) -> list[str]:
    """Return `count` neighbours of the list. Their place is the commit's hash, so commits take all of them in time."""
    start = int(commit[:12] or "0", 16)
    return [names[(start + i) % len(names)] for i in range(min(count, len(names)))]


# --- installing ------------------------------------------------------------------------------------------------------


def index_settings(pip_settings: str) -> dict[str, str]:
    """Return for uv, as environment variables, where packages come from, out of what `pip config list` prints.

    A setting of the environment (`:env:`) wins over one of a file, as with pip. Extra indexes are taken over if they
    are on a network: a folder in pip's form may lack what it does not offer, which uv calls an error.
    """
    values: dict[str, str] = {}
    for line in sorted(pip_settings.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        values[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    extra = [address for address in values.get("extra-index-url", "").split() if "://" in address]
    settings = {
        "UV_DEFAULT_INDEX": values.get("index-url", ""),
        "UV_INDEX": (more := " ".join(address for address in extra if not address.startswith("file:"))),
        "UV_INDEX_STRATEGY": "unsafe-best-match" if more else "",  # as pip does; else the first that has any version
        "UV_INSECURE_HOST": " ".join(values.get("trusted-host", "").split()),
        "UV_FIND_LINKS": ",".join(values.get("find-links", "").split()),
        "SSL_CERT_FILE": values.get("cert", ""),
    }
    return {name: value for name, value in settings.items() if value}


def uv(*arguments: str | Path) -> None:
    """Run uv, which is installed with pip once.

    Raises:
        subprocess.CalledProcessError: it failed; it has said why.
    """
    with Path(__file__).open() as this_file:
        fcntl.flock(this_file, fcntl.LOCK_EX)  # the examples may make their environments at the same time
        if not UV.exists():
            subprocess.run([sys.executable, "-m", "venv", UV.parents[1]], check=True)
            pip = [UV.with_name("python"), "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, "-c", ROOT / "constraints-frameworks.txt", "uv"], check=True)
    pip = [UV.with_name("python"), "-m", "pip", "config", "list"]
    output = subprocess.run(pip, check=True, capture_output=True, text=True).stdout
    environment = {"UV_HTTP_TIMEOUT": "180", **index_settings(output), **os.environ}
    subprocess.run([UV, *arguments], check=True, env=environment, cwd=ROOT)


def make(environment: Path, *packages: str | Path) -> None:
    """Make an environment again and install packages, named as for pip; it takes a tenth of pip's time."""
    uv("venv", "--quiet", "--clear", "--python", sys.executable, environment)
    uv("pip", "install", "--quiet", "--python", environment / "bin/python", *packages)


def prepare(group: Group) -> Path:
    """Return the Python of the environment of a group, which is made if it does not match the files of the group."""
    python, stamp = group.environment / "bin/python", group.environment / ".agl-setup"
    if stamp.exists() and stamp.read_text() == group.state():
        return python
    files = ["-c", group.folder / "constraints.txt", "-r", group.folder / "requirements.txt", "-r", TESTING]
    make(group.environment, *files, "--editable", f"{ROOT}{group.extras}")
    if (group.whole / "package.json").exists():
        for name in ("package.json", "package-lock.json"):
            shutil.copy(group.whole / name, group.environment)
        # not `ci`, which fails where a registry lacks a package that only other platforms need
        npm = ["npm", "install", "--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel", "error"]
        for command in (npm, ["npm", "run", "--silent", "--if-present", "link"]):
            subprocess.run(command, cwd=group.environment, check=True, timeout=900)
    for file in group.folder.glob("commands-*.txt"):
        own = group.environment / file.stem
        uv("venv", "--quiet", "--python", sys.executable, own)
        uv("pip", "install", "--quiet", "--python", own / "bin/python", "-r", file)
    stamp.write_text(group.state())
    return python


def lock(group: Group) -> None:
    """Write the newest versions that fit together into `constraints.txt`, and into `commands-<name>.txt`."""
    out = group.folder / "constraints.txt"
    out.unlink(missing_ok=True)
    chosen = [part for name in group.extras.strip("[]").split(",") if name for part in ("--extra", name)]
    flags = ["--no-header", "--no-annotate", "--quiet", "--python-version", PYTHON, "--output-file", out]
    uv("pip", "compile", *flags, *chosen, group.folder / "requirements.txt", TESTING, "pyproject.toml")
    out.write_text(
        f"# The versions that this folder's tests ran with, on Python {PYTHON}.\n{_anywhere(out.read_text())}"
    )
    for file in group.folder.glob("commands-*.in"):
        own = file.with_suffix(".txt")
        _, _, versions_of_python = file.read_text().partition(";")
        options = ["--no-header", "--no-annotate", "--quiet", "--python-version", PYTHON, "--output-file"]
        uv("pip", "compile", *options, own, file)
        lines = _anywhere(own.read_text()).splitlines()
        own.write_text("".join(f"{line} ;{versions_of_python.rstrip()}\n" for line in lines))


def _anywhere(versions: str) -> str:
    """Return the versions without the kind of build (`+cpu`), which other machines may not be offered."""
    return re.sub(r"(==[\w.]+)\+\w+$", r"\1", versions, flags=re.MULTILINE)


# --- running ---------------------------------------------------------------------------------------------------------


def run_tests(group: Group, tests: Sequence[str], **variables: str) -> bool:
    """Run tests in the environment of a group; say whether all passed."""
    modules = group.environment / "node_modules"
    folders = (modules / ".bin", group.environment / "bin", *group.environment.glob("commands-*/bin"))
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    environment = {**os.environ, **QUIET, "AGL_TEST_NODE_MODULES": str(modules), "PATH": path, **variables}
    command = [str(prepare(group)), "-m", "pytest", "-p", "tests.unsteady", *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def run(framework: str, group: Group, arguments: Sequence[str]) -> bool:
    """Run the tests of one framework and the program of its guide, in its environment; say whether all passed."""
    file = group.folder / f"test_{framework.replace('-', '_')}.py"
    guide = f"tests/frameworks/test_guides.py::test_the_program_of_a_guide_is_captured[{framework}]"
    return run_tests(group, [str(file), guide, *arguments], AGL_TEST_FRAMEWORK=framework)


def commit() -> str:
    """Return the hash of the commit; "" where this is no checkout."""
    if shutil.which("git") is None:
        return ""
    process = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return process.stdout.strip()


def run_chosen(
    arguments: Sequence[str],
    what: str,
    all_names: Mapping[str, Group],
    lockable: Mapping[str, Group],
    run: Callable[[str, Group, Sequence[str]], bool],
) -> int:
    """Run those of `all_names` that the arguments name, or write the versions of a group anew; print what passed."""
    own, pytest_arguments = list(arguments), []
    if "--" in own:
        own, pytest_arguments = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog=f"python -m tests.{what}s.environments")
    parser.add_argument("names", nargs="*", metavar=what, help=f"default: all of {', '.join(all_names)}")
    parser.add_argument("--in-turn", type=int, metavar="N", help="run N of them, chosen by the hash of the commit")
    parser.add_argument("--lock", choices=lockable, help="find the versions of an environment anew")
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="make an environment of what follows `--`")
    options = parser.parse_args(own)
    if options.make:
        make(options.make, *pytest_arguments)
        return 0
    if options.lock:
        lock(lockable[options.lock])
        return 0
    if unknown := [name for name in options.names if name not in all_names]:
        parser.error(f"no {what} {', '.join(unknown)}; there are {', '.join(all_names)}")
    chosen = options.names or list(all_names)
    if options.in_turn:
        at = commit()
        chosen = in_turn(list(all_names), options.in_turn, at)
        remaining = ", ".join(name for name in all_names if name not in chosen)
        print(f"Commit {at[:12]} runs {', '.join(chosen)}. Not run this time: {remaining}; make test-{what}s runs all.")
    lines: list[str] = []
    failed = 0
    for name in chosen:
        print(f"--- {name} (environment {all_names[name].name})", flush=True)
        if all_names[name].missing:
            failed += name in options.names
            lines.append(
                f"{name:<22}NOT RUN, not installed: {all_names[name].missing} (Debian: apt-get install nodejs npm)"
            )
            continue
        began = time.monotonic()
        prepare(all_names[name])
        made = time.monotonic()
        passed = run(name, all_names[name], pytest_arguments)
        failed += not passed
        ended = time.monotonic()
        word = "passed" if passed else "FAILED"
        lines.append(f"{name:<22}{word}  {ended - made:4.0f} s, environment {made - began:4.0f} s")
    print("\n".join(lines))
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    """Run frameworks, or do what the arguments request."""
    return run_chosen(arguments, "framework", homes(), {group.name: group for group in groups()}, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
