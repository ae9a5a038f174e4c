"""What is read from a Dockerfile: each instruction is followed as Docker does, or is an error that names it."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.environments.harbor.dockerfile import DockerfileError, Step, read_dockerfile

BASH = ("/usr/bin/bash", "-c")


def steps(folder: Path, text: str) -> list[Step]:
    (folder / "Dockerfile").write_text(text)
    return list(read_dockerfile(folder / "Dockerfile", {"PATH": "/usr/bin"}))


def last(folder: Path, text: str) -> Step:
    return steps(folder, f"FROM x\n{text}")[-1]


# --- lines -----------------------------------------------------------------------------------------------------------

LINES = {
    "one line": ("RUN a && b", "a && b"),
    "lower case": ("run a", "a"),
    "a continued line": ("RUN a && \\\n    b", "a &&     b"),
    "spaces after the backslash": ("RUN a \\  \n b", "a  b"),
    "a comment between": ("RUN a \\\n# why\n  # more\n b", "a  b"),
    "an empty line between": ("RUN a \\\n\n   \n b", "a  b"),
    "nothing on the first line": ("RUN \\\n  a", "a"),
    "a comment that is none": ("RUN echo '#' # x", "echo '#' # x"),
    "the end of the file after a backslash": ("RUN a \\\n", "a"),
    "another escape character": ("", "a  b"),
    "Windows": ("RUN a \\\r\n b\r\n", "a  b"),
}


@pytest.mark.parametrize("name", LINES)
def test_lines_are_joined(name: str, tmp_path: Path) -> None:
    text, command = LINES[name]
    if name == "another escape character":
        step = steps(tmp_path, "# escape=`\nFROM x\nRUN a `\n b")[-1]
    else:
        step = last(tmp_path, text)
    assert step.command == (*BASH, command)


def test_each_instruction_has_its_line(tmp_path: Path) -> None:
    read = steps(tmp_path, "\ufeff# syntax=x\n\nFROM x\nRUN a \\\n  b\n\nRUN c\n")
    assert [step.place for step in read] == ["line 3, 'FROM x'", "line 4, 'RUN a \\\\'", "line 7, 'RUN c'"]


WORD = st.text("ab$#'\"=", min_size=1, max_size=6).filter(lambda word: word[0] != "#")


@given(words=st.lists(WORD, min_size=1, max_size=5), between=st.lists(st.sampled_from(["# c", "", "  "]), max_size=3))
def test_a_command_is_the_same_on_one_line_and_on_several(
    words: list[str], between: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    several = " \\\n".join(word if number == 0 else "\n".join([*between, word]) for number, word in enumerate(words))
    assert last(folder, f"RUN {several}").command == (*BASH, " ".join(words))


# --- variables -------------------------------------------------------------------------------------------------------

VARIABLES = {
    "ENV A=1 B=2": {"A": "1", "B": "2"},
    "ENV A 1 2": {"A": "1 2"},
    'ENV A="x y" B=x\\ y': {"A": "x y", "B": "x y"},
    "ENV A=1\nENV A=2 B=$A": {"A": "2", "B": "1"},  # all variables of a line have the values before it
    "ENV A=1\nENV B=${A}2 C=$A$A D='$A' E=\\$A": {"A": "1", "B": "12", "C": "11", "D": "$A", "E": "$A"},
    "ENV A=$NONE": {"A": ""},
    "ENV PATH=/opt/bin:$PATH": {"PATH": "/opt/bin:/usr/bin"},
    "ARG A=1\nENV B=$A": {"B": "1"},
    "ARG A=1\nENV A=2\nARG A=3\nENV B=$A": {"A": "2", "B": "2"},  # ENV wins
    "ARG A\nENV B=$A": {"B": ""},
}


@pytest.mark.parametrize("text", VARIABLES)
def test_variables_of_the_image(text: str, tmp_path: Path) -> None:
    assert last(tmp_path, text).env == {"PATH": "/usr/bin", **VARIABLES[text]}


def test_a_variable_before_from_is_visible_where_it_is_declared_again(tmp_path: Path) -> None:
    [*_, declared] = steps(tmp_path, "ARG A=1 B=2\nFROM x:$A\nARG A\nRUN a")
    assert declared.args == {"A": "1"}
    assert declared.env == {"PATH": "/usr/bin"}


FOLDERS = {
    "WORKDIR /a\nWORKDIR b\nWORKDIR ../c": "/a/b/../c",
    "WORKDIR a": "/a",
    "ENV A=/env\nARG A=/arg\nWORKDIR $A": "/env",
    "ENV A=/srv B=x\nWORKDIR $A/${B}": "/srv/x",
    'WORKDIR "/a b"': "/a b",
    "WORKDIR /a b": "/a b",
    "RUN a": "/",
}


@pytest.mark.parametrize("text", FOLDERS)
def test_the_working_folder(text: str, tmp_path: Path) -> None:
    assert last(tmp_path, text).workdir == FOLDERS[text]


# --- commands --------------------------------------------------------------------------------------------------------

COMMANDS = {
    "RUN echo $A '$B'": (*BASH, "echo $A '$B'"),  # the shell replaces variables
    'RUN ["echo", "$A b"]': ["echo", "$A b"],
    "RUN [ -e /x ]": (*BASH, "[ -e /x ]"),
    'RUN ["echo", 1]': (*BASH, '["echo", 1]'),
    'SHELL ["/bin/sh", "-e", "-c"]\nRUN a': ("/bin/sh", "-e", "-c", "a"),
    "RUN cat <<<x; echo $((1<<2))": (*BASH, "cat <<<x; echo $((1<<2))"),
}


@pytest.mark.parametrize("text", COMMANDS)
def test_commands(text: str, tmp_path: Path) -> None:
    assert last(tmp_path, text).command == COMMANDS[text]


def test_an_instruction_that_only_an_image_needs_does_nothing(tmp_path: Path) -> None:
    text = "CMD x\nENTRYPOINT x\nEXPOSE 1\nHEALTHCHECK NONE\nLABEL a=b\nONBUILD RUN x\nVOLUME /x\nUSER root\nUSER 0:0"
    for step in steps(tmp_path, f"FROM x\n{text}"):
        assert (step.command, step.copies, step.env, step.workdir) == ((), (), {"PATH": "/usr/bin"}, "/")


# --- files -----------------------------------------------------------------------------------------------------------

COPIES = {
    "COPY a.py .": {"a.py": "/app/a.py"},
    "COPY a.py ./": {"a.py": "/app/a.py"},
    "COPY a.py /": {"a.py": "/a.py"},
    "COPY a.py ..": {"a.py": "/app/../a.py"},
    "COPY a.py new.py": {"a.py": "/app/new.py"},
    "COPY a.py /x/": {"a.py": "/x/a.py"},
    "COPY /a.py ./d/one /x/": {"a.py": "/x/a.py", "d/one": "/x/one"},
    "COPY a.py b.py /x": {"a.py": "/x/a.py", "b.py": "/x/b.py"},
    "COPY *.py /x/": {"a.py": "/x/a.py", "b.py": "/x/b.py"},
    "COPY ?.py /x/": {"a.py": "/x/a.py", "b.py": "/x/b.py"},
    "COPY d /x": {"d": "/x"},
    "COPY d/ /x/": {"d": "/x"},
    "COPY a.py d /x/": {"a.py": "/x/a.py", "d": "/x"},
    "COPY . .": {"": "/app"},
    "COPY ../../../a.py /x": {"a.py": "/x"},  # as in Docker, the folder of the Dockerfile is the root of the sources
    'COPY ["a b", "/x y/"]': {"a b": "/x y/a b"},
    'ENV D=d\nCOPY "$D" /x': {"d": "/x"},
    "COPY --chown=1:1 --link a.py /x": {"a.py": "/x"},
    "ADD a.py /x": {"a.py": "/x"},
}


@pytest.fixture
def context(tmp_path: Path) -> Path:
    for name in ("a.py", "b.py", "a b", "d/one"):
        (tmp_path / "environment" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "environment" / name).write_text(name)
    (tmp_path / "secret").write_text("of this machine")
    return tmp_path / "environment"


@pytest.mark.parametrize("text", COPIES)
def test_copies(text: str, context: Path) -> None:
    copies = last(context, f"WORKDIR /app\n{text}").copies
    assert {str(path.relative_to(context)).replace(".", "", path == context): target for path, target in copies} == (
        COPIES[text]
    )


# --- errors ----------------------------------------------------------------------------------------------------------

ERRORS = {
    "FROM y": "several stages needs an image",
    "RUN": "it has no arguments",
    "cowsay": "it has no arguments",
    "cow say": "COW is not supported",
    "USER worker": "only the user root",
    "SHELL bash": "SHELL is not supported",
    "RUN --mount=type=cache,target=/x a": "RUN --mount is not supported",
    "RUN <<EOF\nls\nEOF": "here-documents are not supported",
    "RUN cat <<-'EOF' > x\nls\nEOF": "here-documents are not supported",
    "COPY <<EOF /x\nls\nEOF": "here-documents are not supported",
    "COPY a.py": "it has no target",
    "COPY none.py .": "the task has no file 'none.py'",
    "COPY *.c .": r"the task has no file '\*.c'",
    "COPY --from=x a.py .": "--from=x is not supported",
    "COPY --chmod=755 a.py .": "--chmod=755 is not supported",
    "COPY ../secret .": "the task has no file '../secret'",
    "COPY link .": "the task has no file 'link'",
    "COPY parent/secret .": "the task has no file 'parent/secret'",
    "COPY parent .": "the task has no file 'parent'",
    "ADD https://example.com/x .": "from the network",
    "ADD git@example.com:x.git .": "from the network",
    "ADD packed.tar.gz .": "unpacking an archive is not supported",
    "COPY 'a.py .": "a quote is not closed",
    "ENV A=1 B": "can't find = in",
    "ENV A='1": "a quote is not closed",
    "ENV A=${B:-1}": r"the form \$\{B: of a variable",
    "WORKDIR $NONE": "its variables are empty",
}


@pytest.mark.parametrize("text", ERRORS)
def test_an_instruction_that_cannot_be_followed_is_named(text: str, context: Path) -> None:
    (context / "link").symlink_to(context.parent / "secret")
    (context / "parent").symlink_to(context.parent)
    with tarfile.open(context / "packed.tar.gz", "w:gz") as packed:
        packed.add(context / "a.py")
    with pytest.raises(DockerfileError, match=ERRORS[text]) as error:
        last(context, f"RUN a\n{text}")
    assert str(error.value).startswith(f"the Dockerfile at line 3, {text.splitlines()[0]!r}: ")


def test_ignored_files_are_not_copied_unseen(context: Path) -> None:
    (context / ".dockerignore").write_text("d\n")
    with pytest.raises(DockerfileError, match=r"a \.dockerignore is not supported"):
        last(context, "COPY . .")
