"""Objects and values that a command line or a file names: `module:object`, `file.py:object`, tasks in a file."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from agentlightning.errors import BadRequestError, did_you_mean

_FORMS = "expected module:object or file.py:object, such as my_agent:run"


def is_target(text: str) -> bool:
    """True if a text names an object: it has a colon, and what follows it is a name."""
    module, colon, path = text.rpartition(":")
    return bool(colon and module) and all(part.isidentifier() for part in path.split("."))


def load_target(option: str, text: str) -> Any:
    """Import the module (the working folder is looked at, too) and return the object.

    Raises:
        BadRequestError: there is no such module, file or object; names the option and the nearest right name.
    """
    if not is_target(text):
        raise BadRequestError(f"{option} {text!r}: {_FORMS}")
    name, _, path = text.rpartition(":")
    found: Any = _module(option, name)
    for part in path.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, [known for known in dir(found) if not known.startswith("_")])
            raise BadRequestError(f"{option} {text!r}: {name} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


def _module(option: str, name: str) -> ModuleType:
    """Import a module by name or file. A child process that is started anew finds it under the same name."""
    file = Path(name) if name.endswith(".py") else None
    if file is not None and not file.is_file():
        raise BadRequestError(f"{option}: there is no file {name!r}")
    folder, module_name = (str(file.resolve().parent), file.stem) if file is not None else (str(Path.cwd()), name)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not
        raise BadRequestError(f"{option}: there is no module {module_name!r} here or on the path; {_FORMS}") from None
    if file is not None and Path(module.__file__ or "").resolve() != file.resolve():
        raise BadRequestError(f"{option} {name!r}: another module is called {module_name!r} already; rename the file")
    return module


def read_mapping(option: str, path: Path, expected: str = "a mapping") -> dict[str, Any]:
    """Return what a YAML or JSON file holds.

    Raises:
        BadRequestError: it cannot be read, is neither, or holds no mapping.
    """
    import yaml

    try:
        read: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequestError(f"{option} {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise BadRequestError(f"{option} {path} is neither YAML nor JSON: {error}") from error
    if not isinstance(read, dict):
        raise BadRequestError(f"{option} {path} must hold {expected}; got {type(read).__name__}")
    return {str(key): value for key, value in read.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] -- foreign data


def load_dataset(option: str, value: object) -> Any:
    """Return a dataset: a list as it is, the tasks of a `.json` or `.jsonl` file, or the object that is named.

    A function is called without arguments.

    Raises:
        BadRequestError: a text is none of these, or a line of the file is no JSON; says which.
    """
    if not isinstance(value, str):
        return value
    if is_target(value) and not Path(value).is_file():
        found = load_target(option, value)
        return found() if callable(found) and not hasattr(found, "__getitem__") else found
    path = Path(value)
    if not path.is_file():
        raise BadRequestError(
            f"{option}: there is no file {value!r}; expected a .json or .jsonl file, or module:object"
        )
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix == ".jsonl":
        return [_task(option, value, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    return _task(option, value, 1, "\n".join(lines))


def _task(option: str, file: str, number: int, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadRequestError(f"{option} {file}, line {number} is no JSON: {error}") from None
