"""Programs of the documents, word for word, and how a test runs one.

`documents/NNN.md` holds the snippets of one document in its order; a line `Excluded:` lists the others.

To add a snippet: put it into its document's file (a heading with its name, the place in the document, a fenced block;
its words as they stand, only lost indentation restored), write a test that runs it, and let the table be made again
with `make documents`, which writes docs/reference/documents.md:

    @pytest.mark.snippet("004/shared-memory")
    def test_shared_memory_by_its_class(shown: Shown) -> None:
        trainer = shown.run(n_runners=2).trainer    # names that the text around the snippet gives
        ...                                         # use what it made, and assert what it did

    @pytest.mark.snippet("001/client-server-port", differs="the test listens on a free port")
    def test_settings_of_client_server_in_a_dict(shown: Shown) -> None:
        ...

    @pytest.mark.snippet("004/own-store", instead="a store in Redis is not part of the release")
    def test_a_store_of_ones_own(shown: Shown) -> None:
        with shown.explains(ModuleNotFoundError, "write-a-store"):
            shown.run()

The mark has one of three verdicts. Without a word the snippet runs as it is written, and the test asserts what the
document says of it. `differs` says what the test changed, or what a user adds: a port, an address, a package that is
replaced. `instead` is the reason why the snippet ends in an error that says what to write.

A test of a snippet takes the fixture `shown` and calls `run` (`await shown.start(...)` in an event loop), or reads
`text`, `exports` and `commands` of a shell's snippet. `explains` is for an error that tells what to write instead.
`tells` adds what a snippet that runs says beside it. A test over two seconds is `heavy`.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import linecache
import os
import re
import shlex
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import isawaitable
from pathlib import Path
from typing import Any

import pytest

from tests.stubs.processes import Process

FOLDER = Path(__file__).parent / "documents"
_BLOCK = re.compile(
    r"^## (?P<name>[\w-]+)\n\n(?P<place>[^\n]+)\n\n```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Snippet:
    """One program of a document."""

    document: str
    """Number of the document: `000`."""
    name: str
    place: str
    """Heading that it stands under."""
    language: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.document}/{self.name}"


@dataclass(frozen=True)
class Document:
    """One document: its title, what of it is no program, its snippets in order."""

    number: str
    title: str
    left_out: str
    snippets: tuple[Snippet, ...]


@cache
def documents() -> tuple[Document, ...]:
    """Return all documents, in the order of their numbers."""
    return tuple(_document(path) for path in sorted(FOLDER.glob("*.md")))


def _document(path: Path) -> Document:
    text = path.read_text(encoding="utf-8")
    snippets = tuple(Snippet(path.stem, **block.groupdict()) for block in _BLOCK.finditer(text))
    assert len(snippets) == len(re.findall("^## ", text, re.MULTILINE)), f"{path.name}: a heading without its block"
    title = text.partition("\n")[0].removeprefix("# ")
    left_out = "".join(re.findall(r"^Excluded: (.+)$", text, re.MULTILINE))
    return Document(path.stem, title, left_out, snippets)


@cache
def snippets() -> dict[str, Snippet]:
    """Return all snippets by their ids, `000/mongo-store`."""
    return {snippet.id: snippet for document in documents() for snippet in document.snippets}


class Shown:
    """A snippet in a test: runs it, and keeps what it said for the table."""

    def __init__(self, snippet: Snippet, patch: pytest.MonkeyPatch, *, differs: str = "", instead: str = "") -> None:
        self.snippet = snippet
        self.text = snippet.text
        self.differs = differs
        self.instead = instead
        self.used = False
        self.said: list[str] = []
        self.patch = patch

    def run(self, /, *, after: Sequence[str] = (), name: str = "snippet", **names: Any) -> Any:
        """Run the snippet and return its module, whose attributes are the names that it made.

        `after` are ids of snippets that the text puts before it and that run first, in the same module. `given` are
        the names that the text around it gives. `name` is the module's name; `__main__` for a program that asks.
        """
        made = [asyncio.run(waiting) for waiting in self._module(after, name, names) if isawaitable(waiting)]
        assert all(value is None for value in made)
        return self._made

    async def start(self, /, *, after: Sequence[str] = (), name: str = "snippet", **names: Any) -> Any:
        """`run` for a test with an event loop: a snippet that awaits at its top level awaits there."""
        for waiting in self._module(after, name, names):
            if isawaitable(waiting):
                await waiting
        return self._made

    def _module(self, after: Sequence[str], name: str, names: dict[str, Any]) -> Iterator[Any]:
        """Run one snippet after the other; yield what is to be awaited of it."""
        self.used = True
        module = types.ModuleType("snippet")  # the name by which its functions are found again
        vars(module).update(names)
        self._made = module
        self.patch.setitem(sys.modules, "snippet", module)
        for snippet in (*(snippets()[earlier] for earlier in after), self.snippet):
            assert snippet.language == "python", f"{snippet.id} is no Python"
            file = f"<{snippet.id} {next(_NUMBERS)}>"
            linecache.cache[file] = (len(snippet.text), None, snippet.text.splitlines(keepends=True), file)
            code = compile(snippet.text, file, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            module.__name__ = name if snippet is self.snippet else "snippet"
            yield eval(code, vars(module))

    def module_text(self) -> str:
        """Return the snippet as the text of a module that awaits what it awaits at its top level."""
        self.used = True
        return f"import ast, asyncio\nTEXT = {self.text!r}\n" + (
            "code = compile(TEXT, 'snippet', 'exec', flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)\nasyncio.run(eval(code))\n"
        )

    def project(self, module: str, **names: Any) -> None:
        """Let the snippet import these names from a module of its own project."""
        parts = module.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if path not in sys.modules:
                self.patch.setitem(sys.modules, path, types.ModuleType(path))
        vars(sys.modules[module]).update(names)

    @property
    def exports(self) -> dict[str, str]:
        """Variables that a shell's snippet exports or a Dockerfile's `ENV` sets, as the shell reads their values."""
        self.used = True
        joined = self.text.replace("\\\n", " ")
        lines = re.findall(r"^(?:export|ENV) (.+)$", joined, re.MULTILINE)
        return dict(word.split("=", 1) for line in lines for word in shlex.split(line) if "=" in word)

    def export(self, **instead: str) -> None:
        """Set the variables that the snippet exports; `instead` gives those that only its own machines can have."""
        assert instead.keys() <= self.exports.keys()
        self._check_is_told(instead)
        for variable, value in (self.exports | instead).items():
            self.patch.setenv(variable, value)

    @property
    def commands(self) -> list[list[str]]:
        """Commands of a shell's snippet but for `export`, in words, variables as they stand."""
        self.used = True
        lines = [line for line in self.text.splitlines() if line and not line.startswith(("#", "export "))]
        return [shlex.split(line) for line in lines]

    def script(self, folder: Path, here: Mapping[str, str] | None = None, **programs: str) -> Process:
        """Start the snippet in a shell, in `folder`, where `programs` lie: name without `.py`, and text.

        `python` is this one. The names of machines that a snippet has cannot be reached from here: those of `here` are
        replaced.
        """
        self.used = True
        self.named({name: value for name, value in (here or {}).items() if name in self.text})
        commands = folder / "commands"
        commands.mkdir(parents=True, exist_ok=True)
        for name, text in programs.items():
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
        (commands / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (commands / "python").chmod(0o755)
        path = f"{commands}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "PYTHONPATH": str(Path(__file__).parents[2])}
        return Process(["bash", "-e", "-c", self.text], folder, environment)

    def beside(self, name: str) -> Shown:
        """Return another snippet, which is changed as this one is."""
        return Shown(snippets()[name], self.patch, differs=self.differs or self.instead)

    def named(self, instead: dict[str, str]) -> Shown:
        """Put addresses of this machine in the place of those that only the snippet's own machines have."""
        self._check_is_told(instead)
        for name, value in instead.items():
            assert name in self.text
            self.text = self.text.replace(name, value)
        return self

    def _check_is_told(self, changes: dict[str, str]) -> None:
        assert not changes or self.differs or self.instead, f"{self.snippet.id}: say with differs= what is changed"

    @contextmanager
    def explains(self, error: type[BaseException], *patterns: str, **hidden: str) -> Iterator[None]:
        """Expect an error that says what to write: it matches each of `patterns`. Its text goes into the table.

        `hidden` is what differs from run to run: `port="4747"` lets the table say `<port>` in its place.
        """
        assert self.instead, f"{self.snippet.id} does not run: say why, instead=..."
        with pytest.raises(error) as caught:
            yield
        assert self.used
        text = " ".join(str(caught.value).split())
        assert all(re.search(pattern, text) for pattern in patterns), text
        for word, value in hidden.items():
            text = text.replace(value, f"<{word}>")
        self.said.append(f"`{type(caught.value).__name__}: {text.replace('`', chr(39))}`")

    @contextmanager
    def warns_of(self, name: str) -> Iterator[None]:
        """Expect a deprecation warning that has this name in it. Its text goes into the table."""
        with pytest.warns(DeprecationWarning, match=re.escape(name)) as warned:
            yield
        self.tells(warned[0].message)

    def tells(self, text: object, when: str = "message:") -> None:
        """Keep for the table what the snippet says although it runs: a warning, or an error (`when` something is not
        as it runs)."""
        message = f"{type(text).__name__}: {text}" if isinstance(text, BaseException) else str(text)
        self.said.append(f"{when} `{' '.join(message.split()).replace('`', chr(39))}`")

    @property
    def outcome(self) -> str:
        """The snippet's cell in the table."""
        if self.instead:
            return f"{INSTEAD}: {'; '.join(self.said)}, because {self.instead}"
        verdict = f"{DIFFERS}: {self.differs}" if self.differs else AS_WRITTEN
        return f"{verdict}; {'; '.join(self.said)}" if self.said else verdict


def both_end(algorithm: Process, runner: Process) -> None:
    """Wait for two machines that run the tasks of `parts.py`, and check their output."""
    assert "role algorithm result 2 rollouts (2 scored), mean reward 0.500" in algorithm.succeeded()
    assert "role runner" in runner.succeeded()


AS_WRITTEN, DIFFERS, INSTEAD = "as written", "differs", "write this instead"
"""The verdicts on a row of the page."""

_NUMBERS = itertools.count()
