"""The figures of `bench.shape` that run a checkout's code: imports, help texts, and the path of one rollout.

Run as a script with the checkout's root folder as its argument; prints one line of JSON. It imports nothing of this
package, because the checkout may be an older one.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import importlib
import inspect
import json
import logging
import pkgutil
import pydoc
import re
import sys
import tempfile
import textwrap
import threading
import typing
import warnings
from pathlib import Path
from types import FrameType
from typing import Any


def count_largest_cycle() -> int:
    """Count the modules of the largest import cycle; imports for type checkers count."""
    import grimp

    graph = grimp.build_graph("agentlightning", cache_dir=None)
    below: dict[str, set[str]] = {}
    for module in graph.modules:
        visited: set[str] = set()
        todo = [module]
        while todo:
            new = graph.find_modules_directly_imported_by(todo.pop()) - visited
            visited |= new
            todo += new
        below[module] = visited
    return max(1, *(sum(module in below[other] for other in below[module]) for module in below))


def public_values() -> list[type]:
    """Return the pydantic models, dataclasses, typed dicts and named tuples that a module lists in `__all__`."""
    import pydantic

    import agentlightning

    names = [module.name for module in pkgutil.walk_packages(agentlightning.__path__, "agentlightning.")]
    values: dict[type, None] = {}
    for name in ["agentlightning", *(name for name in names if not name.endswith("__main__"))]:
        try:
            module = importlib.import_module(name)
        except ImportError:  # a part whose optional dependency is not installed
            continue
        for public in getattr(module, "__all__", []):
            value = getattr(module, public, None)
            if not isinstance(value, type) or not value.__module__.startswith("agentlightning"):
                continue
            if issubclass(value, pydantic.BaseModel) or dataclasses.is_dataclass(value) or _is_typed_record(value):
                values[value] = None
    return list(values)


def _is_typed_record(value: type) -> bool:
    return typing.is_typeddict(value) or (issubclass(value, tuple) and hasattr(value, "_fields"))


def count_public_fields() -> dict[str, int]:
    """Count the fields of public values, and those whose explanation `help()` prints.

    A field's explanation is its pydantic description, the docstring below it in the source, or a line `name: text` of
    the class's docstring. It counts if the text of `help()` holds its beginning.
    """
    total = explained = 0
    for value in public_values():
        shown = _words(pydoc.plain(pydoc.render_doc(value)))
        written = _attribute_docstrings(value)
        for field in _field_names(value):
            total += 1
            text = written.get(field) or _line_of_docstring(value, field)
            explained += bool(text) and _words(text)[:30] in shown
    return {"public_fields": total, "public_fields_explained": explained}


def _words(text: str) -> str:
    return re.sub(r"[\s|]+", " ", text).strip()


def _field_names(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif hasattr(value, "model_fields"):
        names = list(value.model_fields)
    else:
        names = list(getattr(value, "_fields", None) or value.__annotations__)
    return [name for name in names if not name.startswith("_")]


def _attribute_docstrings(value: Any) -> dict[str, str]:
    docstrings: dict[str, str] = {}
    for base in reversed(value.__mro__):
        if not base.__module__.startswith("agentlightning"):
            continue
        try:
            [body] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError, ValueError):  # a generated class without source
            continue
        if not isinstance(body, ast.ClassDef):
            continue
        for one, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(after, ast.Expr):
                text = after.value.value if isinstance(after.value, ast.Constant) else None
                if isinstance(text, str):
                    docstrings[one.target.id] = text
    for name, field in getattr(value, "model_fields", {}).items():
        if field.description:
            docstrings[name] = field.description
    return docstrings


def _line_of_docstring(value: Any, field: str) -> str:
    match = re.search(rf"^\s*`?{field}`?(?: \(.*?\))?: (.+)$", value.__doc__ or "", re.MULTILINE)
    return match.group(1) if match else ""


class Trace:
    """Records which files of the package run a function, and the calls by which a claim reaches its script."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._stacks: dict[asyncio.Task[Any], list[tuple[str, str]]] = {}
        self.files: set[str] = set()
        self.calls_to_claim: list[int] = []

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Record a call; passed to `sys.setprofile`. Code that runs during an import does not count."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._package) or self._is_importing(frame):
            return
        self.files.add(code.co_filename)
        if code.co_name == "claim" and "/store/" in code.co_filename and code.co_varnames[:1] == ("tx",):
            self._note_claim(self._stack(frame))

    def make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Start a task that remembers its creator, so that its stack continues there."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
        self._stacks[task] = self._stack(sys._getframe(1))
        return task

    def _note_claim(self, stack: list[tuple[str, str]]) -> None:
        script = stack[0][1]
        depth = max(i for i, (_, file) in enumerate(stack) if file == script)
        depth = next(i for i in range(len(stack)) if i == depth or stack[i + 1][1] != script)
        starts = [i for i, (name, _) in enumerate(stack) if name.endswith("Claims.next")]
        if starts:
            self.calls_to_claim.append(starts[0] - depth)

    def _is_importing(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(self._package):
                return True
            frame = frame.f_back
        return False

    def _stack(self, frame: FrameType | None) -> list[tuple[str, str]]:
        """Return the package's calls on the stack, innermost first; a task's stack continues with its creator's."""
        stack: list[tuple[str, str]] = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(self._package):
                stack.append((code.co_qualname, code.co_filename))
            if code.co_filename.endswith("asyncio/events.py"):
                task = asyncio.current_task()
                return stack + (self._stacks.get(task, []) if task is not None else [])
            frame = frame.f_back
        return stack


def trace_one_rollout(root: Path) -> dict[str, int]:
    """Run `tests/test_one_rollout.py` and count the package's files that run a function, and a claim's calls."""
    import agentlightning  # noqa: F401 -- its own import does not count
    from tests import test_one_rollout

    trace = Trace(f"{root}/agentlightning/")

    async def steps() -> None:
        asyncio.get_running_loop().set_task_factory(trace.make_task)
        await test_one_rollout.test_one_rollout_from_task_to_token_rows()

    threading.setprofile(trace.note)
    sys.setprofile(trace.note)
    try:
        asyncio.run(steps())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type] -- None ends it
    return {"files_of_one_rollout": len(trace.files), "calls_to_claim": max(trace.calls_to_claim, default=-1)}


class StepTrace(logging.Handler):
    """Counts the package's files that run a function in the second step of a run, and how often a thread goes from one
    file to another. A step ends with its line in the log."""

    def __init__(self, package: str) -> None:
        super().__init__()
        self._package = package
        self._counts = False
        self._last = threading.local()
        self.files: set[str] = set()
        self.changes = 0

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Take a call; given to `sys.setprofile`."""
        file = frame.f_code.co_filename
        if self._counts and event == "call" and file.startswith(self._package):
            self.files.add(file)
            self.changes += getattr(self._last, "file", file) != file
            self._last.file = file

    def emit(self, record: logging.LogRecord) -> None:
        """Begin after the line of the first step, end with that of the second."""
        if record.getMessage().startswith("step   "):
            self._counts = record.getMessage().startswith("step   1/")


def trace_one_step(root: Path) -> dict[str, int]:
    """Train two steps of GRPO with two rollouts each, and count the files and changes of file in the second one."""
    import agentlightning as agl
    from tests.algorithm.parts import ask, save_untrained_model, say

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        return len(ask(llm, [say(task)])["content"] or "") / 10

    trace = StepTrace(f"{root}/agentlightning/")
    logger = logging.getLogger("agentlightning")
    logger.setLevel(logging.INFO)
    logger.addHandler(trace)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"max_steps": 2, "batch_size": 1, "num_generations": 2, "save_steps": 0}
        algorithm = agl.GRPO(
            model=save_untrained_model(Path(folder) / "model"),
            output_dir=f"{folder}/run",
            max_completion_length=4,
            progress="none",
            **settings,
        )
        threading.setprofile(trace.note)
        sys.setprofile(trace.note)
        try:
            agl.Trainer(algorithm=algorithm, strategy="shm", n_runners=1).fit(agent, train_dataset=["one"])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type] -- None ends it
            logger.removeHandler(trace)
    return {"files_of_one_step": len(trace.files), "file_changes_of_one_step": trace.changes}


def main() -> int:
    root = Path(sys.argv[1]).resolve()
    sys.path[0] = str(root)  # instead of this script's folder
    warnings.simplefilter("ignore")
    import agentlightning

    assert Path(agentlightning.__file__).is_relative_to(root), agentlightning.__file__
    figures = trace_one_rollout(root) | trace_one_step(root) | count_public_fields()
    figures["largest_cycle"] = count_largest_cycle()
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
