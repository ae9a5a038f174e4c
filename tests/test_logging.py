"""Logging: only our logger is configured, and each option does what it says."""

from __future__ import annotations

import io
import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.logging import RichHandler

import agentlightning as agl
import agentlightning.logging
from agentlightning.logging import DATE_FORMAT, DEFAULT_FORMAT, JsonLines, log_context


@pytest.fixture(autouse=True)
def loggers_are_put_back() -> Iterator[None]:
    names = ["agentlightning", "agentlightning.store", "a.stranger"]
    before = {n: (logging.getLogger(n).level, logging.getLogger(n).propagate) for n in names}
    yield
    logging.captureWarnings(False)
    for name, (level, propagate) in before.items():
        logger = logging.getLogger(name)
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
        logger.propagate = propagate
        logger.disabled = False


def test_the_names_of_the_package_are_these_functions() -> None:
    assert agl.setup_logging is agentlightning.logging.setup
    assert agl.setup_module_logging is agentlightning.logging.setup_module


def test_the_root_logger_is_left_alone_and_handlers_are_replaced() -> None:
    before = logging.getLogger().handlers[:]
    agl.setup_logging("DEBUG")
    agl.setup_logging("INFO")
    base = logging.getLogger("agentlightning")
    assert logging.getLogger().handlers == before
    assert [isinstance(handler, RichHandler) for handler in base.handlers] == [True]
    assert (base.level, base.propagate) == (logging.INFO, False)


def test_without_colour_a_line_holds_time_level_process_logger_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    agl.setup_logging("INFO", color=False)
    logging.getLogger("agentlightning.store").info("hello %s", "there")
    line = capsys.readouterr().err
    assert "[INFO]" in line
    assert f"Process-{os.getpid()} agentlightning.store" in line
    assert line.rstrip().endswith("hello there")


def test_without_a_console_there_is_no_handler() -> None:
    agl.setup_logging(console=False)
    assert logging.getLogger("agentlightning").handlers == []


def test_files_are_written_for_the_base_logger_or_for_several(tmp_path: Path) -> None:
    one, two = tmp_path / "deep" / "all.log", tmp_path / "store.log"
    agl.setup_logging("INFO", console=False, files=str(one))
    logging.getLogger("agentlightning.store").info("first")
    agl.setup_logging("INFO", console=False, files={"agentlightning": one, "agentlightning.store": two})
    agl.setup_logging("INFO", console=False, files={"agentlightning.store": two})
    logging.getLogger("agentlightning.store").info("second")
    assert "first" in one.read_text()
    assert two.read_text().count("second") == 1


def test_levels_of_submodules_are_applied_and_a_lower_one_is_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    agl.setup_logging("WARNING", color=False, submodule_levels={"agentlightning.store": "DEBUG"})
    assert logging.getLogger("agentlightning.store").level == logging.DEBUG
    assert "agentlightning.store" in capsys.readouterr().err


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid log level: 'LOUD'; expected one of DEBUG, INFO"):
        agl.setup_logging("LOUD")


def test_extra_handlers_are_added_once_and_take_the_formatter_if_they_have_none() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    agl.setup_logging(console=False, extra_handlers=[handler, handler], formatter=logging.Formatter("<%(message)s>"))
    logging.getLogger("agentlightning").warning("once")
    assert stream.getvalue() == "<once>\n"


def test_other_loggers_may_get_the_same_handlers() -> None:
    agl.setup_logging("ERROR", color=False, apply_to=["a.stranger"])
    base, stranger = logging.getLogger("agentlightning"), logging.getLogger("a.stranger")
    assert (stranger.handlers, stranger.level, stranger.propagate) == (base.handlers, logging.ERROR, False)


def test_warnings_may_be_logged() -> None:
    agl.setup_logging(console=False, capture_warnings=True)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        logging.getLogger("py.warnings").addHandler(handler)
        warnings.warn("mind the gap", UserWarning, stacklevel=1)
        logging.getLogger("py.warnings").removeHandler(handler)
    assert "mind the gap" in stream.getvalue()


def test_the_old_function_warns() -> None:
    with pytest.warns(DeprecationWarning, match="use setup_logging"):
        assert agl.configure_logger(logging.ERROR).level == logging.ERROR


def test_the_formats_are_constants() -> None:
    assert DATE_FORMAT == "%H:%M:%S"
    assert all(f"%({field})" in DEFAULT_FORMAT for field in ("asctime", "levelname", "process", "name", "message"))


# --- ids and JSON lines ----------------------------------------------------------------------------------------------


def test_a_line_ends_with_the_ids_of_what_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    agl.setup_logging("INFO", color=False)
    logger = logging.getLogger("agentlightning.store")
    with log_context(run_id="run-1"), log_context(rollout_id="ro-2", attempt_id="at-3"):
        logger.info("here")
        logger.info("[Rollout ro-2] named already")
    logger.info("outside")
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith("here (run run-1, rollout ro-2, attempt at-3)")
    assert second.endswith("[Rollout ro-2] named already (run run-1, attempt at-3)")
    assert third.endswith("outside")


def test_each_line_may_be_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.log"
    agl.setup_logging("INFO", json_lines=True, files=path)
    with log_context(run_id="run-1", rollout_id="ro-2"):
        try:
            raise KeyError("x")
        except KeyError:
            logging.getLogger("agentlightning.runner").exception("two\nlines, %s", {"of": "it"})
    [line] = path.read_text().splitlines()
    entry = json.loads(line)
    assert capsys.readouterr().err == line + "\n"
    assert entry["message"] == "two\nlines, {'of': 'it'}"
    assert (entry["level"], entry["logger"], entry["process"]) == ("ERROR", "agentlightning.runner", os.getpid())
    assert (entry["run_id"], entry["rollout_id"], "attempt_id" in entry) == ("run-1", "ro-2", False)
    assert entry["time"].endswith("+00:00")
    assert entry["exception"].endswith("KeyError: 'x'")


@pytest.mark.parametrize("other", [{"formatter": logging.Formatter()}, {"color": {"show_path": False}}])
def test_json_lines_go_with_no_other_form(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="json_lines=True cannot be combined"):
        agl.setup_logging(json_lines=True, **other)


async def test_what_is_logged_while_an_attempt_runs_has_its_ids() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    agl.setup_logging("INFO", console=False, extra_handlers=[handler])
    store = agl.InMemoryLightningStore()

    @agl.rollout
    def in_a_thread(task: str) -> float:
        logging.getLogger("agentlightning.mine").info("working on %s", task)
        return 1.0

    @agl.rollout
    async def in_a_task(task: str) -> float:
        logging.getLogger("agentlightning.mine").info("working on %s", task)
        return 1.0

    for agent in (in_a_thread, in_a_task):
        runner = agl.LitAgentRunner[str](agl.OtelTracer(), max_rollouts=1)
        rollout = await store.enqueue_rollout("it", run_id=None)
        with runner.run_context(agent=agent, store=store):
            await runner.iter()
        entries = [json.loads(line) for line in stream.getvalue().splitlines()]
        [mine] = [
            line for line in entries if line["message"] == "working on it" and line["rollout_id"] == rollout.rollout_id
        ]
        [attempt] = await store.query_attempts(rollout.rollout_id)
        assert mine["attempt_id"] == attempt.attempt_id
    await store.close()
