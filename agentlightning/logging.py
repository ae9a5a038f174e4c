"""Logging of this package: `setup` and `setup_module` choose handlers and formats. The root logger is never touched."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DEFAULT_FORMAT = "%(asctime)s [%(levelname)s] (Process-%(process)d %(name)s)   %(message)s"
DATE_FORMAT = "%H:%M:%S"
BASE_LOGGER = "agentlightning"
_WIDTH_WITHOUT_TERMINAL = 200
_LEVELS = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}


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
) -> None:
    """Configure the logger `agentlightning`; its former handlers are replaced and closed.

    Args:
        color: rich output on the console; a dict gives options of rich's handler.
        submodule_levels: level per logger name.
        formatter: for handlers that have none.
        apply_to: further loggers that get the same handlers and level.
        files: one log file, or one per logger name; folders are made.

    Raises:
        ValueError: an unknown level.
    """
    base = setup_module(
        level, console=console, color=color, propagate=propagate, disable_existing_loggers=disable_existing_loggers
    )
    for handler in dict.fromkeys(extra_handlers or ()):
        base.addHandler(handler)
    for name, submodule_level in (submodule_levels or {}).items():
        _set_submodule_level(base, name, submodule_level)
    named = {BASE_LOGGER: files} if isinstance(files, (str, Path)) else dict(files or {})
    for name, path in named.items():
        _add_file(logging.getLogger(name), Path(path))
    if formatter is not None:
        for handler in base.handlers:
            if handler.formatter is None:
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
    """Configure one logger with a console handler (or none) and return it.

    Raises:
        ValueError: an unknown level.
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
    if console:
        logger.addHandler(_console_handler(color))
    return logger


def configure_logger(level: int = logging.INFO, name: str = BASE_LOGGER) -> logging.Logger:
    """Deprecated: use `setup_module`."""
    warnings.warn("configure_logger is deprecated, use setup_logging", DeprecationWarning, stacklevel=2)
    return setup_module(level, name=name)


def level_number(level: int | str) -> int:
    """Return the number of a level.

    Raises:
        ValueError: no such level.
    """
    if isinstance(level, int):
        return level
    number = _LEVELS.get(level.strip().upper())
    if number is None:
        raise ValueError(f"Invalid log level: {level!r}; expected one of {', '.join(_LEVELS)}")
    return number


def _console_handler(color: bool | dict[str, Any]) -> logging.Handler:
    if color is False:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(DEFAULT_FORMAT, DATE_FORMAT))
        return handler
    from rich.console import Console
    from rich.logging import RichHandler

    terminal = sys.stderr is not None and sys.stderr.isatty()  # a process without a terminal may have no stderr
    console = Console(stderr=True, width=None if terminal else _WIDTH_WITHOUT_TERMINAL)
    options: dict[str, Any] = {"console": console, "rich_tracebacks": False, "markup": False}
    return RichHandler(**options | (color if isinstance(color, dict) else {}))


def _set_submodule_level(base: logging.Logger, name: str, level: int | str) -> None:
    number = level_number(level)
    if number < base.level:
        base.warning("the level of %s is below that of %s; its handlers decide what is shown", name, base.name)
    logging.getLogger(name).setLevel(number)


def _add_file(logger: logging.Logger, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    target = str(path.resolve())
    if any(isinstance(h, logging.FileHandler) and h.baseFilename == target for h in logger.handlers):
        return
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setLevel(logger.getEffectiveLevel())
    handler.setFormatter(logging.Formatter(DEFAULT_FORMAT, DATE_FORMAT))
    logger.addHandler(handler)
