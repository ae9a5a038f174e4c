"""Logging of this package: `setup` and `setup_module` set handlers and formats. The root logger is never changed.

Every line logged within `log_context` ends with the ids of its run, rollout and attempt. JSON lines have them as
fields.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import sys
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from typing_extensions import override

from agentlightning.base.private_files import make_private, private_folder
from agentlightning.base.terminal import json_text, one_line, shortened, some_lines

DEFAULT_FORMAT = "%(asctime)s [%(levelname)s] (Process-%(process)d %(name)s)   %(message)s"
"""Format of plain lines."""
DATE_FORMAT = "%H:%M:%S"
"""Time format of plain lines."""
BASE_LOGGER = "agentlightning"
"""Name of the parent of all loggers of the package."""
_WIDTH_WITHOUT_TERMINAL = 200
MOST_CHARACTERS = 64 * 1024
"""Maximum length of a message and of a traceback, in characters."""
MOST_ON_CONSOLE = 16 * 1024
"""Maximum length of a line on a console, in characters."""
_MOST_COLOURED = 500
"""Maximum length of a coloured message. The highlighter takes at most 0.03 s for it, but 8 s for 16,000 characters."""
_LEVELS = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
_ids: ContextVar[Mapping[str, str]] = ContextVar("agentlightning_log_ids")


@contextmanager
def log_context(
    *, run_id: str | None = None, rollout_id: str | None = None, attempt_id: str | None = None
) -> Generator[None]:
    """Add ids to all lines that are logged within the context, also by called functions.

    Contexts nest. An id that is None is inherited from the outer context.
    """
    ids = {"run_id": run_id, "rollout_id": rollout_id, "attempt_id": attempt_id}
    token = _ids.set({**log_ids(), **{name: value for name, value in ids.items() if value is not None}})
    try:
        yield
    finally:
        _ids.reset(token)


def log_ids() -> Mapping[str, str]:
    """Return the ids of the open contexts: `run_id`, `rollout_id` and `attempt_id`, if set."""
    return _ids.get({})


def setup(
    level: int | str = "INFO",
    *,
    console: bool = True,
    color: bool | dict[str, Any] = True,
    propagate: bool = False,
    disable_existing_loggers: bool = False,
    capture_warnings: bool = False,
    submodule_levels: Mapping[str, int | str] | None = None,
    extra_handlers: Sequence[logging.Handler] | None = None,
    formatter: logging.Formatter | None = None,
    apply_to: Sequence[str] | None = None,
    files: str | Path | Mapping[str, str | Path] | None = None,
    json_lines: bool = False,
) -> None:
    """Configure the logger `agentlightning`. Existing handlers are replaced and closed.

    Args:
        color: rich output on the console; a dict is passed to rich's handler.
        propagate: also pass lines to the root logger's handlers.
        disable_existing_loggers: silence every other existing logger.
        capture_warnings: also log Python's warnings.
        submodule_levels: level per logger name.
        extra_handlers: handlers in addition to console and files.
        formatter: formatter for handlers without one.
        apply_to: additional loggers that get the same handlers and level.
        files: one log file, or one per logger name. Folders are created.
        json_lines: write each line on the console and in the files as one JSON object, without colours.

    Raises:
        ValueError: The level is unknown, or `json_lines` is combined with settings of another format.
    """
    if json_lines and (formatter is not None or isinstance(color, dict)):
        raise ValueError("json_lines=True cannot be combined with formatter or with a dict of color options")
    base = setup_module(
        level,
        console=console,
        color=color if not json_lines else False,
        propagate=propagate,
        disable_existing_loggers=disable_existing_loggers,
    )
    lines: logging.Formatter = JsonLines() if json_lines else PlainLines(DEFAULT_FORMAT, DATE_FORMAT)
    if json_lines:
        for handler in base.handlers:
            handler.setFormatter(lines)
    for handler in dict.fromkeys(extra_handlers or ()):
        base.addHandler(handler)
    for name, submodule_level in (submodule_levels or {}).items():
        number = level_number(submodule_level)
        if number < base.level:
            base.warning("the level of %s is below that of %s, whose handlers may drop its lines", name, base.name)
        logging.getLogger(name).setLevel(number)
    paths = {BASE_LOGGER: files} if isinstance(files, (str, Path)) else dict(files or {})
    for name, path in paths.items():
        logger, file = logging.getLogger(name), Path(path)
        private_folder(file.parent)
        target = str(file.resolve())
        if any(isinstance(h, logging.FileHandler) and h.baseFilename == target for h in logger.handlers):
            continue
        make_private(file)
        file_handler = logging.FileHandler(file, encoding="utf-8")
        file_handler.setLevel(logger.getEffectiveLevel())
        file_handler.setFormatter(lines)
        logger.addHandler(file_handler)
    for handler in base.handlers:
        if formatter is not None and (handler.formatter is None or isinstance(handler.formatter, _Message)):
            handler.setFormatter(formatter)
    for name in apply_to or ():
        other = logging.getLogger(name)
        other.handlers = list(base.handlers)
        other.setLevel(base.level)
        other.propagate = False
    if capture_warnings:
        logging.captureWarnings(True)


def setup_module(
    level: int | str = "INFO",
    *,
    name: str = BASE_LOGGER,
    console: bool = True,
    color: bool | dict[str, Any] = True,
    propagate: bool = False,
    disable_existing_loggers: bool = False,
) -> logging.Logger:
    """Configure one logger, with or without a console handler, and return it.

    `color`, `propagate` and `disable_existing_loggers` have the same meaning as for `setup`.

    Raises:
        ValueError: The level is unknown.
    """
    number = level_number(level)
    if disable_existing_loggers:
        for other in list(logging.Logger.manager.loggerDict):
            logging.getLogger(other).disabled = other != name
    logger = logging.getLogger(name)
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(number)
    logger.propagate = propagate
    if console and color is False:
        plain = logging.StreamHandler()
        plain.setFormatter(PlainLines(DEFAULT_FORMAT, DATE_FORMAT))
        logger.addHandler(plain)
    elif console:
        from rich.console import Console

        terminal = sys.stderr is not None and sys.stderr.isatty()  # a process without a terminal may have no stderr
        stderr = Console(stderr=True, width=None if terminal else _WIDTH_WITHOUT_TERMINAL)
        options: dict[str, object] = {"console": stderr, "rich_tracebacks": False, "markup": False}
        rich_handler = _console_class()(**options | (color if isinstance(color, dict) else {}))
        rich_handler.setFormatter(_Message("%(message)s"))
        logger.addHandler(rich_handler)
    return logger


setup_logging = setup
"""Name of `setup` in `agl`."""
setup_module_logging = setup_module
"""Name of `setup_module` in `agl`."""


def configure_logger(level: int = logging.INFO, name: str = BASE_LOGGER) -> logging.Logger:
    """Deprecated. Use `setup` or `setup_module`."""
    warnings.warn("configure_logger is deprecated; use setup_logging", DeprecationWarning, stacklevel=2)
    return setup_module(level, name=name)


def level_number(level: int | str) -> int:
    """Return the number of a level.

    Raises:
        ValueError: The level is unknown.
    """
    if isinstance(level, int):
        return level
    number = _LEVELS.get(level.strip().upper())
    if number is None:
        raise ValueError(f"Invalid log level: {level!r}; expected one of {', '.join(_LEVELS)}")
    return number


@functools.cache
def _console_class() -> type[Any]:
    """Return rich's handler with a length limit, because its highlighter takes quadratic time."""
    from rich.console import ConsoleRenderable
    from rich.logging import RichHandler
    from rich.text import Text

    class BoundedHandler(RichHandler):
        @override
        def render_message(self, record: logging.LogRecord, message: str) -> ConsoleRenderable:
            if len(message) <= _MOST_COLOURED:
                return super().render_message(record, message)
            return Text(shortened(message, MOST_ON_CONSOLE))

    return BoundedHandler


# --- the form of a line ----------------------------------------------------------------------------------------------


class PlainLines(logging.Formatter):
    """A formatter that appends the current ids to the message, unless the line already contains them.

    Lines have a maximum length and no terminal control characters. Values filled into a message stay on one line.
    """

    @override
    def format(self, record: logging.LogRecord) -> str:
        shown = copy.copy(record)
        shown.msg, shown.args, shown.exc_text = message_of(record), None, None
        return super().format(shown)

    @override
    def formatException(self, ei: Any) -> str:
        return bounded_exception(super().formatException(ei))

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        labels = [f"{name.removesuffix('_id')} {value}" for name, value in log_ids().items() if value not in text]
        return f"{text} ({', '.join(labels)})" if labels else text


class _Message(PlainLines):
    """The message part of a console line. A formatter of the user replaces it."""


class JsonLines(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, process, message, ids of `log_context`, exception."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": message_of(record),
            **log_ids(),
        }
        if record.exc_info:
            line["exception"] = bounded_exception(self.formatException(record.exc_info))
        return json_text(json.dumps(line, ensure_ascii=False, default=str))


def message_of(record: logging.LogRecord) -> str:
    """Return the message of a record with its values filled in, each on one line, up to the maximum length."""
    text, args = str(record.msg), record.args
    if args:
        shown = (
            {key: _shown(each) for key, each in args.items()} if isinstance(args, Mapping) else tuple(map(_shown, args))
        )
        try:
            text %= shown
        except (TypeError, ValueError):  # a type of number that %d takes and a text does not
            text = record.getMessage()
    return some_lines(shortened(text, MOST_CHARACTERS))


def bounded_exception(text: str) -> str:
    """Return the `text` of a traceback without control characters, shortened to its end if it is too long."""
    if len(text) > MOST_CHARACTERS:
        text = f"({len(text)} characters) ...{text[-MOST_CHARACTERS:]}"
    return some_lines(text)


def _shown(value: object) -> Any:
    return value if value is None or isinstance(value, (bool, int, float)) else _Shown(value)


class _Shown:
    """A value that is filled into a message."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    @override
    def __str__(self) -> str:
        return one_line(shortened(str(self._value), MOST_CHARACTERS))

    @override
    def __repr__(self) -> str:
        return one_line(shortened(repr(self._value), MOST_CHARACTERS))
