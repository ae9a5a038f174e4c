"""Everything that the documents name exists: files, functions, modules, attributes; the Python that they print runs."""

from __future__ import annotations

import ast
import asyncio
import importlib
import os
import re
import subprocess
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.training.external.verl.settings import GONE, OWN
from agentlightning.types import LLM
from agentlightning.verl.__main__ import OURS
from tests.pages import ROOT, blocks
from tests.stubs.processes import run_program
from tests.stubs.running import run_through_gateway
from tests.test_one_rollout import agent as two_calls

OF_THE_ROOT = ("README", "CONTRIBUTING", "AGENTS", "CODE_OF_CONDUCT", "SECURITY")
PAGES = (path for folder in ("contrib", "docs", "examples") for path in (ROOT / folder).rglob("*.md"))
BELOW = sorted(path for path in PAGES if not {"node_modules", "tasks"} & set(path.parts))  # tasks for agents
DOCUMENTS = (*(ROOT / f"{name}.md" for name in OF_THE_ROOT), *BELOW)
MIGRATION = ROOT / "docs/reference/migration.md"
ABSENT = "## Not in this release"

SNIPPETS = ROOT / "docs/reference/documents.md"
"""Made by tests/seeds; it quotes names of others, and says that they are not there."""


OF_OTHERS = {"convert_hf_to_gguf.py", "protocol.py", "train.py", "my_agent.py", "folder/file.py"}
"""Files of other programs and of users that docstrings name."""


def code_lines(document: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each line of code of a document."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE):
        yield from ((language, line) for line in block.splitlines())


def kept() -> frozenset[Path]:
    """Return the files of the repository, those not yet added too, and the folders that they lie in."""
    if not (ROOT / ".git").exists():
        return frozenset()
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [ROOT / name for name in listed if name]
    return frozenset(files) | {folder for file in files for folder in file.parents if folder.is_relative_to(ROOT)}


KEPT = kept()

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
each_of_ours = pytest.mark.parametrize(
    "document", [each for each in DOCUMENTS if each != SNIPPETS], ids=lambda path: str(path.relative_to(ROOT))
)
"""All files but the one that quotes paths of others; tests/seeds/test_table.py checks that its tests exist."""


def prose(document: Path) -> str:
    """Return a document without its code blocks."""
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


# --- files and what is in them -----------------------------------------------------------------------------------


@each_of_ours
def test_every_file_and_folder_that_a_document_names_exists(document: Path) -> None:
    """A path is relative to the root, the package, the document, or a folder that is named on the same line.

    What a build leaves behind does not count: in a fresh clone it is not there.
    """
    missing: list[str] = []
    written = set(re.findall(r"^# ([\w.]+)$", document.read_text(), re.MULTILINE))  # by a block, see `run_page`
    for line in prose(document).splitlines():
        paths = [span for span in re.findall(r"`([^`]+)`", line) if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span)]
        paths = [path for path in paths if "/" in path or path.endswith((".py", ".md", ".toml"))]
        bases = [ROOT, document.parent, ROOT / "agentlightning"]
        bases += [base / path for path in paths if path.endswith("/") for base in bases[:3]]
        missing += [path for path in paths if path not in written and not any(is_kept(base / path) for base in bases)]
    assert missing == []


def test_every_file_and_folder_that_a_docstring_names_exists() -> None:
    """A path is relative to the root, to a package that holds the module, or to a folder that the docstring names."""
    package = ROOT / "agentlightning"
    folders = {path.name for parent in (ROOT, package) for path in parent.iterdir() if path.is_dir()}
    missing: list[tuple[str, str]] = []
    for file in package.rglob("*.py"):
        texts = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Expr)]
        for text in (text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)):
            paths = re.findall(r"(?<![\w./{<-])(?:[\w-]+/)*(?:[\w-]+\.py\b|(?<=/)(?=[^\w.{<*]))", text)
            paths = [path for path in paths if path.endswith(".py") or path.partition("/")[0] in folders]
            bases = [ROOT, *(parent for parent in file.parents if parent.is_relative_to(package))]
            bases += [base / path for path in paths if path.endswith("/") for base in tuple(bases)]
            there = OF_OTHERS | {path for path in paths if any((base / path).exists() for base in bases)}
            missing += [(str(file.relative_to(ROOT)), path) for path in paths if path not in there]
    assert missing == []


def is_kept(path: Path) -> bool:
    """True for a file or folder of the repository; outside a checkout, for one that exists."""
    if not (ROOT / ".git").exists():
        return path.exists()
    return Path(os.path.normpath(path)) in KEPT


@each_document
def test_every_link_of_a_document_leads_to_a_file(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose(document))
    local = [target for target in targets if not target.startswith(("http://", "https://"))]
    assert [target for target in local if not (document.parent / target).is_file()] == []


def test_every_page_is_reached_from_the_index() -> None:
    """A page has a row of its own there, or in the index of its folder."""
    indexes = [path for path in BELOW if path.name in ("index.md", "README.md")]
    reached = {(path.parent / link).resolve() for path in indexes for link in re.findall(r"\]\(([^)#]+)", prose(path))}
    assert [
        str(path.relative_to(ROOT)) for path in BELOW if path.resolve() not in reached and path not in indexes
    ] == []
    assert (ROOT / "examples/README.md").resolve() in reached


@each_document
def test_every_function_that_a_document_names_behind_its_file_is_in_that_file(document: Path) -> None:
    pairs = re.findall(r"`(agentlightning/[\w/]+\.py)`((?:,? `[A-Za-z_][\w.]*`)+)", prose(document))
    named = [(path, name) for path, names in pairs for name in re.findall(r"`([\w.]+)`", names)]
    named += re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", prose(document))
    assert [(path, name) for path, name in named if name not in set(definitions(ROOT / path))] == []


def definitions(path: Path) -> Iterator[str]:
    """Yield what a file defines at its top, and the methods of its classes as `Class.method`."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
            methods = (item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)))
            yield from (f"{node.name}.{method.name}" for method in methods)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name


@each_document
def test_no_document_names_a_path_of_one_machine(document: Path) -> None:
    assert re.findall(r"(?<![\w.:/])/(?:home|root|tmp|usr|opt|mnt|work)/\S*", document.read_text()) == []


# --- names -------------------------------------------------------------------------------------------------------


@each_document
def test_every_dotted_name_of_the_package_that_a_document_uses_exists(document: Path) -> None:
    if document == SNIPPETS:
        return
    names = set(re.findall(r"\bagentlightning(?:\.\w+)+", as_it_works(document)))
    verl = SETTINGS_OF_VERL if document.name in VERL_PAGES else frozenset[str]()
    assert sorted(name for name in names if not (name in verl or is_attribute_key(name) or is_importable(name))) == []


def as_it_works(document: Path) -> str:
    """Return a document without programs that it shows with the error in which they end."""
    shown = r"^```python\n# from the v0.3 documentation\n.*?^```\n\n```text\n.*?^```"
    return re.sub(shown, "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


VERL_PAGES = ("verl.md", "scale-with-verl.md")
SETTINGS_OF_VERL = frozenset(f"agentlightning.{name}" for name in (*OWN, *GONE, *OURS))
"""Settings of VERL's configuration, in which our settings have this name before them."""


def is_attribute_key(name: str) -> bool:
    """True for a span name or attribute key, a part of one (`....reward.0.name`), or the start of several."""
    keys = {value for value in vars(semconv).values() if isinstance(value, str) and value.startswith("agentlightning.")}
    for group in vars(semconv).values():
        if isinstance(group, type) and issubclass(group, Enum):
            keys |= {str(member.value) for member in group}
    whole = re.sub(r"\.\d+(\.\w+)?$|(?<=operation\.input)\.\w+$", "", name)
    return whole in keys or any(key.startswith(name + ".") for key in keys)


def is_importable(name: str) -> bool:
    """True for a module, or something that is reached from one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:length]))
            for part in parts[length:]:
                value = getattr(value, part)
        except (ModuleNotFoundError, AttributeError):
            continue
        return True
    return False


@each_document
def test_every_name_of_agl_that_a_document_uses_exists(document: Path) -> None:
    if document == SNIPPETS:
        return
    present = document.read_text().partition(ABSENT)[0]
    names = set(re.findall(r"\bagl\.(?!db\b)(\w+)", present))  # agl.db is a file
    assert sorted(name for name in names if not hasattr(agl, name)) == []


def absent_rows() -> list[list[str]]:
    """Return the rows of the table of what this release does not have: name, instead."""
    section = MIGRATION.read_text().partition(ABSENT)[2]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 2
    return rows[2:]


def test_the_weak_points_of_training_are_all_shown_by_a_test() -> None:
    page = (ROOT / "docs/deep-dive/proof.md").read_text()
    rows = re.findall(r"^\| (\d+) \| .+ \| (.+) \|$", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(16, 27))
    assert [number for number, shown in rows if "::test_" not in shown] == []


def test_what_migration_calls_absent_is_absent_and_what_it_recommends_is_there() -> None:
    absent = [name for row in absent_rows() for name in re.findall(r"\bagl\.(\w+)", row[0])]
    instead = [name for row in absent_rows() for name in re.findall(r"\bagl\.(\w+)", row[1])]
    assert absent
    assert [name for name in absent if hasattr(agl, name)] == []
    assert [name for name in instead if not hasattr(agl, name)] == []


def test_modules_that_migration_calls_absent_are_absent() -> None:
    spans = [span for row in absent_rows() for span in re.findall(r"`([a-z_]+(?:\.[a-z_]+)?)`", row[0])]
    assert "store.collection" in spans
    assert [span for span in spans if is_importable(f"agentlightning.{span}")] == []


# --- programs ----------------------------------------------------------------------------------------------------


def all_python_blocks() -> list[tuple[str, str]]:
    """Return every Python block of every document, with the name of its document and its number."""
    return [(f"{d.relative_to(ROOT)}-{n}", block) for d in DOCUMENTS for n, block in enumerate(blocks(d))]


@pytest.mark.parametrize(("name", "block"), all_python_blocks(), ids=[name for name, _ in all_python_blocks()])
def test_the_python_of_a_document_compiles(name: str, block: str) -> None:
    assert compile(block, name, "exec").co_names, "a block that names nothing shows nothing"


def test_documents_that_show_a_fence_of_python_have_blocks_that_are_found() -> None:
    fences = sum(document.read_text().count("\n```python\n") for document in DOCUMENTS)
    assert len(all_python_blocks()) == fences > 0


@agl.rollout
def graded(task: dict[str, float], llm: LLM) -> float:
    """Two model calls, and the reward that the task names."""
    two_calls("hello", llm)
    return task["reward"]


async def run_a_group(path: Path) -> list[str]:
    """Run one group of eight rollouts of a second step, every other one worth 1.0, and return their ids."""
    store = SQLiteLightningStore(path, synchronous="NORMAL")
    tasks = [{"reward": float(number % 2)} for number in range(8)]
    finished = await run_through_gateway(store, graded, *tasks, metadata={"step": 2}, concurrency=4)
    await store.close()
    return [rollout.rollout_id for rollout in finished]


def test_the_program_of_one_rollout_shows_the_whole_path_of_a_run(tmp_path: Path) -> None:
    rollout_ids = asyncio.run(run_a_group(tmp_path / "store.db"))
    [program] = blocks("deep-dive/one-rollout.md")
    (tmp_path / "one_rollout.py").write_text(program)
    done = run_program("python", "one_rollout.py", "store.db", folder=tmp_path)
    assert f'"rollout_id": "{rollout_ids[1]}"' in done.stdout, "the first of the better half of the group"
    assert done.stdout.count('"name": "raw_gen_ai_request"') == 2
    assert done.stdout.count("Trained(row=1, ") == 2
    assert "LedgerSummary(step=2, captured=16, trained=16," in done.stdout


@each_of_ours
def test_code_that_a_reader_copies_is_at_most_88_columns_wide(document: Path) -> None:
    """Output of programs, in blocks marked `text`, `json` or not at all, is as it is printed."""
    output = ("", "text", "json")
    assert [line for language, line in code_lines(document) if language not in output and len(line) > 88] == []
