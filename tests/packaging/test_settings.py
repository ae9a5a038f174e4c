"""The page on settings is what the package says, and says all that the package reads and writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentlightning import semconv
from agentlightning.env_var import FOREIGN_VARIABLES, PROGRAM_VARIABLES, LightningEnvVar
from agentlightning.exit_codes import ExitCode
from agentlightning.llm_proxy import LLMProxy
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import LLM
from tests.packaging import settings
from tests.stubs.model_server import ModelServer
from tests.test_one_rollout import agent as asks_twice

PACKAGE = Path(__file__).parents[2] / "agentlightning"
TREES = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
KNOWN = {*FOREIGN_VARIABLES, *PROGRAM_VARIABLES, *(each.value for each in LightningEnvVar)}


def test_the_page_is_up_to_date() -> None:
    assert settings.PAGE.read_text() == settings.page(), "run: python -m tests.packaging.settings"


def read_variables(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module looks up in `os.environ`, where they are written there or in a constant."""
    constants = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Attribute(attr="environ"), slice=name):
                pass
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ")), args=[name, *_]):
                pass
            case ast.Call(func=ast.Attribute(attr="getenv") | ast.Name(id="secret" | "getenv"), args=[name, *_]):
                pass
            case ast.keyword(arg="envvar", value=name):
                pass
            case ast.Compare(left=name, comparators=[ast.Attribute(attr="environ")]):
                pass
            case _:
                continue
        value = name.value if isinstance(name, ast.Constant) else constants.get(getattr(name, "id", ""))
        if isinstance(value, str):
            yield value


def test_every_variable_that_a_module_looks_up_is_on_the_page() -> None:
    names = {name for tree in TREES.values() for name in read_variables(tree)}
    assert {"AGL_RUN_ID", "OPENAI_API_KEY", "PROMETHEUS_MULTIPROC_DIR", "RAY_ADDRESS"} <= names
    assert names - KNOWN == set()


def test_every_key_of_ours_that_a_module_writes_out_is_a_constant_of_semconv() -> None:
    keys = set(re.findall(r"`(agentlightning\.[\w.]+)`", settings.PAGE.read_text()))
    of_ours = re.compile(r"agentlightning\.(call|reward|link|tag|message|object|operation|spans_cut)(\.\w[\w.]*\w)?")
    written = {
        node.value
        for path, tree in TREES.items()
        if path.name != "semconv.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and of_ours.fullmatch(node.value)
    }
    assert "agentlightning.reward" in written
    assert written - keys == set()


@pytest.mark.parametrize("code", [code for code in ExitCode if code > 2])
def test_an_exit_code_is_written_in_one_place(code: ExitCode) -> None:
    written = [
        str(path.relative_to(PACKAGE))
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Return, ast.Call)) and _gives(node, code)
    ]
    assert written == []


def _gives(node: ast.Return | ast.Call, code: int) -> bool:
    if isinstance(node, ast.Return):
        return isinstance(node.value, ast.Constant) and node.value.value == code
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    is_end = name in ("Exit", "exit", "_exit", "SystemExit")
    return is_end and any(isinstance(argument, ast.Constant) and argument.value == code for argument in node.args)


def pattern(key: str) -> str:
    return re.sub(r"<[ij]>", r"\\d+", re.escape(key)).replace("<field>", r"\w+").replace("<setting>", r"\w+")


async def test_every_attribute_of_a_run_through_the_gateway_is_on_the_page() -> None:
    prefixes = (semconv.LightningSpanAttributes.OPERATION_INPUT.value, semconv.LightningSpanAttributes.TAG.value)
    keys = re.findall(r"^\| `([^`]+)`", settings.PAGE.read_text(), re.MULTILINE)
    store = InMemoryLightningStore()
    with ModelServer() as model:
        proxy = LLMProxy(store=store, model_list=[model.entry("m")])
        await proxy.start()
        own = LLM(endpoint=model.base_url, model="m", api_key="none")
        for llm in (proxy.as_resource(), own):
            await store.add_resources({"main_llm": llm})
            await store.enqueue_rollout("hello", mode="train")
        runner = LitAgentRunner[str](OtelTracer(), max_rollouts=2)
        with runner.run_context(agent=asks_twice, store=store):
            await runner.iter()
        await proxy.stop()
    spans = [span for each in await store.query_rollouts() for span in await store.query_spans(each.rollout_id)]
    await store.close()
    used = {key for span in spans for key in (*span.attributes, *span.resource.attributes)}
    used = {key for key in used if not key.startswith(("telemetry.sdk.", "service.", *prefixes))}
    assert {"gen_ai.prompt.0.content", "agentlightning.call.state", "agentlightning.reward.0.value"} <= used
    assert {key for key in used if not any(re.fullmatch(pattern(name), key) for name in keys)} == set()
