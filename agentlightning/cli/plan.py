"""The plan of `agl run`: a Trainer with its agent and its datasets, from a file or from Python.

The file (YAML or JSON) has the keys of `Plan`. `trainer` holds the settings of `agl.Trainer`: components as names,
import paths or dicts, functions and hooks as `module:object`. An error in the file raises a `BadRequestError` that
names the key or option, and the closest valid name.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, cast

from agentlightning.cli.output import say, show_traceback
from agentlightning.errors import BadRequestError, did_you_mean
from agentlightning.execution.base import exit_code_of
from agentlightning.utils.concurrency.interrupts import TerminateAsInterrupt
from agentlightning.utils.concurrency.loops import TERMINATED

if TYPE_CHECKING:
    from agentlightning.trainer import Trainer
    from agentlightning.types import NamedResources


@dataclass
class Plan:
    """The keys of the file."""

    trainer: Any = None
    agent: Any = None
    train_dataset: Any = None
    val_dataset: Any = None
    dev: bool = False

    def checked(self) -> Plan:
        """Return the plan with each name replaced by the object that it names."""
        if self.agent is None:
            raise BadRequestError("No agent is set. Add agent: module:object to the file, or use --agent module:object")
        agent = load_target("agent", self.agent) if isinstance(self.agent, str) else self.agent
        return Plan(
            trainer=made_trainer(self.trainer),
            agent=agent() if isinstance(agent, type) else agent,
            train_dataset=load_dataset("train_dataset", self.train_dataset),
            val_dataset=load_dataset("val_dataset", self.val_dataset),
            dev=self.dev,
        )


def read_plan(path: Path, settings: Sequence[str]) -> Plan:
    """Return the plan in a file. `settings` are `key=value` texts that override it, such as `trainer.n_runners=4`."""
    import yaml

    data = read_mapping("the file", path)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise BadRequestError(f"--set {setting!r}: expected key=value, such as trainer.n_runners=4")
        value, place = yaml.safe_load(text), data
        *above, last = key.split(".")
        for part in above:
            below = place.setdefault(part, {})
            if not isinstance(below, dict):
                raise BadRequestError(f"--set {key}=...: expected a mapping at {part!r} in the file; got {below!r}")
            place = cast("dict[str, Any]", below)
        place[last] = value
    names = [each.name for each in fields(Plan)]
    for key in data:
        if key not in names:
            hint = did_you_mean(key, names) or f"; expected one of {', '.join(names)}"
            raise BadRequestError(f"{path} has an unknown key {key!r}{hint}")
    return Plan(**data)


def made_trainer(settings: object) -> Trainer[Any]:
    """Return a Trainer with these settings. An existing Trainer is returned unchanged."""
    from agentlightning.trainer import Trainer

    if isinstance(settings, Trainer):
        return cast("Trainer[Any]", settings)
    if settings is not None and not isinstance(settings, Mapping):
        raise BadRequestError(f"trainer must be a mapping of agl.Trainer settings; got {settings!r}")
    arguments = dict(cast("Mapping[str, Any]", settings or {}))
    for key, read in _READERS.items():
        if arguments.get(key) is not None:
            arguments[key] = read(arguments[key])
    return Trainer(**arguments)


def _resources(value: object) -> NamedResources:
    from pydantic import TypeAdapter, ValidationError

    from agentlightning.types import NamedResources

    try:
        return TypeAdapter(NamedResources).validate_python(value)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise BadRequestError(
            f"trainer.initial_resources: {wrong}. Expected a mapping of names to resources, such as "
            "prompt: {resource_type: prompt_template, engine: f-string, template: ...}"
        ) from None


def _hooks(value: object) -> list[object]:
    values = list(cast("list[object]", value)) if isinstance(value, list) else [value]
    hooks = [_object("trainer.hooks", each) for each in values]
    return [each() if isinstance(each, type) else each for each in hooks]


def _faults(value: object) -> dict[object, float]:
    import builtins

    if not isinstance(value, Mapping):
        raise BadRequestError(f"trainer.policy_faults must map exceptions to rewards; got {value!r}")
    rewards = cast("Mapping[str, float]", value)
    return {
        getattr(builtins, name, None) or _object("trainer.policy_faults", name): reward
        for name, reward in rewards.items()
    }


def _object(option: str, value: object) -> object:
    return load_target(option, value) if isinstance(value, str) else value


def _algorithm(value: object) -> object:
    return load_target("trainer.algorithm", value) if isinstance(value, str) and is_target(value) else value


_READERS: dict[str, Callable[[object], object]] = {
    "initial_resources": _resources,
    "hooks": _hooks,
    "policy_faults": _faults,
    "reward_fn": partial(_object, "trainer.reward_fn"),
    "algorithm": _algorithm,
}
"""Functions that read the settings of a Trainer that are not specs."""


_FORMS = "expected module:object or file.py:object, such as my_agent:run"


def is_target(text: str) -> bool:
    """Return True if a text names an object, that is, ends in a colon and a name."""
    module, colon, path = text.rpartition(":")
    return bool(colon and module) and all(part.isidentifier() for part in path.split("."))


def load_target(option: str, text: str) -> Any:
    """Import the module, also from the working folder, and return the object."""
    if not is_target(text):
        raise BadRequestError(f"{option} {text!r}: {_FORMS}")
    name, _, path = text.rpartition(":")
    target: Any = _module(option, name)
    for part in path.split("."):
        if not hasattr(target, part):
            hint = did_you_mean(part, [name for name in dir(target) if not name.startswith("_")])
            raise BadRequestError(f"{option} {text!r}: {name} has no {part!r}{hint}")
        target = getattr(target, part)
    return target


def _module(option: str, name: str) -> ModuleType:
    """Import a module by name or file, under a name that a child process can import too."""
    file = Path(name) if name.endswith(".py") else None
    if file is not None and not file.is_file():
        raise BadRequestError(f"{option}: file {name!r} not found")
    folder, module_name = (str(file.resolve().parent), file.stem) if file is not None else (str(Path.cwd()), name)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports does not
        raise BadRequestError(f"{option}: module {module_name!r} not found here or on the path; {_FORMS}") from None
    if file is not None and Path(module.__file__ or "").resolve() != file.resolve():
        raise BadRequestError(f"{option} {name!r}: another module is already named {module_name!r}. Rename the file")
    return module


def read_mapping(option: str, path: Path, expected: str = "a mapping") -> dict[str, Any]:
    """Return the contents of a YAML or JSON file."""
    import yaml

    try:
        content: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequestError(f"{option} {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise BadRequestError(f"{option} {path} is neither YAML nor JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadRequestError(f"{option} {path} must contain {expected}; got {type(content).__name__}")
    return {str(key): value for key, value in content.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] -- foreign data


def load_dataset(option: str, value: object) -> Any:
    """Return a dataset: a list unchanged, the tasks of a `.json`, `.jsonl` or `.parquet` file, or the named object.

    A function is called without arguments.
    """
    from agentlightning.trainer.datasets import read_tasks

    if not isinstance(value, str):
        return value
    if is_target(value) and not Path(value).is_file():
        dataset = load_target(option, value)
        return dataset() if callable(dataset) and not hasattr(dataset, "__getitem__") else dataset
    return read_tasks(option, value, other=", or module:object")


_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_OF_USERS = tuple(os.path.join(folder, "") for folder in (str(Path(__file__).parents[1]), *_LIBRARIES))
"""Folders of this package and of libraries, each with a trailing separator."""


def in_foreground(work: Callable[[], None]) -> int:
    """Run a training to its end and return the exit code.

    0 for success, 130 after Ctrl+C, 143 after SIGTERM, 69 if the store does not respond for too long, 77 if it rejects
    the token, 1 otherwise. Errors from the user's code are shown with their traceback, other errors as one line.
    """
    termination = TerminateAsInterrupt()
    before = signal.signal(signal.SIGTERM, termination)
    ctrl_c = signal.getsignal(signal.SIGINT)
    if ctrl_c is signal.SIG_IGN:  # a shell sets it for background processes of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        work()
    except KeyboardInterrupt:
        return TERMINATED if termination.received else exit_code_of(KeyboardInterrupt())
    except SystemExit as error:
        if error.code != TERMINATED:  # of a strategy, after SIGTERM
            raise
        return TERMINATED
    except Exception as error:  # the boundary: any error that ended the training is shown, and becomes an exit code
        if not has_frame_of_users(error.__traceback__):
            raise_as_code(error)
        show_traceback(error)
        return exit_code_of(error)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.SIG_DFL if ctrl_c is None else ctrl_c)
    return 0


def fit(plan: Plan) -> object:
    """Run a plan's Trainer, close its store, and return the result."""
    trainer = plan.trainer
    run = trainer.dev if plan.dev else trainer.fit
    try:
        run(plan.agent, plan.train_dataset, val_dataset=plan.val_dataset)
    finally:
        asyncio.run(trainer.store.close())
    return trainer.result


def raise_as_code(error: Exception) -> None:
    """Raise the error again. An error with its own exit code is printed and ends the command with that code."""
    import typer

    code = exit_code_of(error)
    if code == 1:
        raise error
    say(f"agl: {error}", lines=True, to_stderr=True)
    raise typer.Exit(code)


def has_frame_of_users(trace: TracebackType | None) -> bool:
    """Return True if an error passed through code outside this package and the installed libraries."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<frozen") and not os.path.abspath(file).startswith(_NOT_OF_USERS):
            return True
        trace = trace.tb_next
    return False
