"""Reads a Dockerfile as far as it can be followed without an image."""

from __future__ import annotations

import io
import json
import posixpath
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from dockerfile_parse import DockerfileParser  # pyright: ignore[reportMissingModuleSource]
from dockerfile_parse.util import WordSplitter, get_key_val_dictionary  # pyright: ignore[reportMissingModuleSource]

_IGNORED = ("CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "ONBUILD", "STOPSIGNAL", "VOLUME")
_HERE_DOCUMENT = re.compile(r"(^|\s)\d*<<-?[^<\s]")
_FORM = re.compile(r"\$\{\w*[^\w}]")


class DockerfileError(ValueError):
    """An instruction cannot be followed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction, and the state after it."""

    place: str
    """The line and the instruction, for messages."""
    env: Mapping[str, str]
    """Variables of the image."""
    args: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables of the build."""
    outer_args: Mapping[str, str] | None = None
    """Variables of the build that were set before FROM; None until FROM."""
    workdir: str = "/"
    shell: Sequence[str] = ("/usr/bin/bash", "-c")
    command: Sequence[str] = ()
    """The command of RUN."""
    copies: Sequence[tuple[Path, str]] = ()
    """Files, and folders whose contents are copied, each with its absolute target."""

    def error(self, why: object) -> DockerfileError:
        """Return an error that names the instruction."""
        return DockerfileError(f"the Dockerfile at {self.place}: {why}")


def read_dockerfile(path: Path, env: Mapping[str, str]) -> Iterator[Step]:
    """Yield the instructions of a Dockerfile. `env` contains the variables of its base image.

    Raises:
        DockerfileError: an instruction is wrong or not supported, or needs an image or a network.
    """
    step = Step("", env)
    text = re.sub(r"(?m)^[ \t]*$", "#", path.read_text("utf-8-sig").rstrip(" \n\\"))  # the parser ends at empty lines
    for read in DockerfileParser(fileobj=io.StringIO(f"{text}\n")).structure:
        if read["instruction"] != "COMMENT":
            line = str(read["content"]).strip().splitlines()[0]
            step = replace(step, place=f"line {read['startline'] + 1}, {line[:120]!r}", command=(), copies=())
            try:
                step = _followed(step, read["instruction"], read["value"].strip(), path.parent)
            except ValueError as error:
                raise step.error(error) from error
            yield step


def _followed(step: Step, name: str, value: str, context: Path) -> Step:
    """Return the step of an instruction; `step` is the state before it.

    Raises:
        ValueError: it cannot be followed.
    """
    if not value:
        raise ValueError("it has no arguments")
    if name in _IGNORED:
        return step
    if name in ("ADD", "COPY", "RUN") and _HERE_DOCUMENT.search(value):
        raise ValueError("here-documents are not supported")
    match name:
        case "FROM" if step.outer_args is None:
            return replace(step, outer_args=step.args, args={})
        case "FROM":
            raise ValueError("a Dockerfile with several stages needs an image")
        case "WORKDIR":
            return replace(step, workdir=str(PurePosixPath(step.workdir, *_words(step, value, most=0))))
        case "ENV":
            return replace(step, env={**step.env, **_pairs(step, value)})
        case "ARG":
            outer = {name: text for name, text in (step.outer_args or {}).items() if name == value}
            return replace(step, args={**step.args, **(_pairs(step, value) if "=" in value else outer)})
        case "SHELL" if shell := _strings(value):
            return replace(step, shell=shell)
        case "RUN" if not value.startswith("--"):
            return replace(step, command=_strings(value) or (*step.shell, value))
        case "ADD" | "COPY":
            return replace(step, copies=_copies(step, name, value, context))
        case "USER" if _words(step, value)[0].split(":")[0] in ("root", "0"):
            return step
        case "USER":
            raise ValueError("a bubblewrap sandbox has only the user root")
        case _:
            raise ValueError(f"{' '.join([name, *re.findall('^--[a-z]+', value)])} is not supported")


def _copies(step: Step, name: str, value: str, context: Path) -> list[tuple[Path, str]]:
    while value.startswith("--"):
        option, _, value = value.partition(" ")
        value = value.lstrip()
        if not option.startswith(("--chown=", "--link")):  # all files belong to root
            raise ValueError(f"{option} is not supported")
    listed = _strings(value)
    parts = _words(step, value) if listed is None else [word for each in listed for word in _words(step, each, most=0)]
    if len(parts) < 2:
        raise ValueError("it has no target")
    if (context / ".dockerignore").exists():
        raise ValueError("a .dockerignore is not supported")
    found = [path for source in parts[:-1] for path in _found(source, context)]
    if name == "ADD" and any(path.is_file() and tarfile.is_tarfile(path) for path in found):
        raise ValueError("unpacking an archive is not supported; use COPY and RUN tar")
    target = PurePosixPath(step.workdir, parts[-1])
    is_folder = len(found) > 1 or parts[-1].endswith("/") or target.name in ("", "..") or parts[-1] in (".", "./")
    return [(path, str(target / path.name if is_folder and path.is_file() else target)) for path in found]


def _found(source: str, context: Path) -> list[Path]:
    """Return the files and folders of a source of COPY, which cannot be outside of the context."""
    if "://" in source or source.startswith("git@"):
        raise ValueError("it copies from the network")
    pattern = posixpath.normpath(f"/{source}").lstrip("/")
    found = sorted(context.glob(pattern)) if pattern else [context]
    if not found or not all(path.resolve().is_relative_to(context.resolve()) for path in found):
        raise ValueError(f"the task has no file {source!r} in {context.name}/")
    return found


def _words(step: Step, text: str, most: int | None = None) -> list[str]:
    """Split a text, at most `most` times, remove its quotes and replace its variables."""
    if form := _FORM.search(text):
        raise ValueError(f"the form {form[0]} of a variable is not supported")
    splitter = WordSplitter(text, step.args, step.env)
    words = [word or "" for word in splitter.split(most)]
    if splitter.quotes or not any(words):
        raise ValueError("a quote is not closed" if splitter.quotes else "its variables are empty")
    return words


def _pairs(step: Step, text: str) -> dict[str, str]:
    _words(step, text)  # for its errors
    return get_key_val_dictionary(text, True, step.args, step.env)


def _strings(value: str) -> list[str] | None:
    """Return the strings of a JSON list; None for another value."""
    try:
        listed: Any = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return listed if isinstance(listed, list) and all(isinstance(each, str) for each in listed) else None
