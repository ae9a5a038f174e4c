"""The reference: every public name is on a page, and name, argument and field have a meaning."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from pathlib import Path

import agentlightning as agl
from tests.packaging import arguments, names, pages

NO_DEFINITION = {"__version__", "integrations", "reward"}
"""A text, a package, and a module that is called."""
WITHOUT = """
    adapter.calls.calls.model_calls adapter.messages.TraceToMessages.get_tool_calls
    adapter.tree.tree.TraceTree adapter.tree.tree.TraceTree.extract_prompt_image_urls
    adapter.tree.tree.TraceTree.find_llm_calls adapter.tree.tree.TraceTree.match_rewards
    adapter.tree.tree.TraceTree.matched_rewards adapter.tree.tree.TraceTree.span_to_triplet
    adapter.tree.tree.TraceTree.to_trajectory adapter.tree.tree.TraceTree.visualize
    adapter.triplet.TracerTraceToTriplet.visualize algorithm.apo.apo.APO.textual_gradient_and_apply_edit
    errors.closest_name execution.events.MultiprocessingEvent legacy.client.AgentLightningClient
    legacy.client.AgentLightningClient.get_resources_by_id legacy.client.AgentLightningClient.get_resources_by_id_async
    legacy.dev.DevTaskLoader.get_resources_by_id legacy.runner.LegacyAgentRunner legacy.server.AgentLightningServer
    legacy.server.AgentLightningServer.queue_task logging.PlainLines.formatException logging.bounded_exception
    types.tracer.Span.from_core_fields utils.metrics.prometheus.shutdown_metrics utils.otlp.body.form_of
    utils.otlp.body.parse_body utils.otlp.body.unpacked utils.otlp.decode.steps_of utils.otlp.decode.unread_steps_of
    utils.otlp.http.handle_otlp_export utils.otlp.json_form.message_from_json utils.otlp.unread.UnreadSpan
"""
"""Functions with an argument that nothing explains: parts of the package that programs seldom call, and names of v0.1.
The list may only become shorter."""


def test_every_argument_that_is_not_listed_here_has_a_meaning() -> None:
    lacking = {place.removeprefix("agentlightning."): found for place, found in arguments.without_meaning().items()}
    assert {place: found for place, found in lacking.items() if place not in WITHOUT.split()} == {}
    assert set(WITHOUT.split()) - set(lacking) == set(), "explained by now: take them out of the list"


def test_the_walk_finds_functions_and_methods_and_constructors() -> None:
    places = {place for place, *_ in arguments.explained_calls()}
    for name in ("trainer.trainer.Trainer", "trainer.trainer.Trainer.fit", "emitter.reward.emit_reward"):
        assert f"agentlightning.{name}" in places
    assert len(places) > 300


def test_the_page_of_arguments_is_up_to_date() -> None:
    assert arguments.PAGE.read_text() == arguments.page(), "run: python -m tests.packaging.arguments"


def test_every_name_of_agl_is_on_a_page() -> None:
    importable = {path for paths in names.public_definitions().values() for path in paths}
    assert {name for name in agl.__all__ if f"agentlightning.{name}" not in importable} == NO_DEFINITION
    assert len(pages.pages_of_names()) > 20
    listed = [place for places in names.pages_of_packages().values() for place in places]
    assert sorted(listed) == sorted(names.public_definitions())


def test_every_public_name_says_what_it_is() -> None:
    assert [place for place, value in arguments.public_objects().items() if not inspect.getdoc(value)] == []
    assert [place for place in names.public_definitions() if not has_docstring(place)] == []


def has_docstring(place: str) -> bool:
    """True for a class or function with a docstring, and for a constant with one below it."""
    module, _, name = place.rpartition(".")
    found: list[bool] = []
    for node, below in pairwise([*names.statements(ast.parse(source_of(module).read_text())), ast.Pass()]):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            found.append(ast.get_docstring(node) is not None)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            found.append(isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant))
    return any(found)  # of overloads the last one has it


def source_of(module: str) -> Path:
    place = names.ROOT / module.replace(".", "/")
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
