"""A bare import loads few modules, every public name exists, and no module depends on itself."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import textwrap
import tomllib
import warnings
from pathlib import Path
from typing import Any

import grimp
import pytest

import agentlightning as agl
from agentlightning.utils.version import VERSION
from tests.stubs.processes import run_program

HEAVY = (
    *("torch", "transformers", "peft", "openai", "aiohttp", "pymongo", "psycopg", "litellm", "agentops", "ray", "vllm"),
    *("starlette", "uvicorn", "psutil", "rich", "typer", "jsonargparse", "prometheus_client", "multiprocessing"),
)


def modules_after(statement: str) -> set[str]:
    """Return the top-level names of the modules that a fresh interpreter holds after the statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    return set(json.loads(run_program("python", "-W", "error", "-c", code).stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import agentlightning", set(HEAVY)),
        (
            "import agentlightning as agl; agl.Trainer, agl.Baseline",
            {"torch", "transformers", "openai", "rich", "typer"},
        ),
        ("import agentlightning as agl; agl.LitAgentRunner, agl.OtelTracer, agl.rollout", {"torch", "starlette"}),
        ("import agentlightning as agl; agl.Span, agl.Rollout", {"torch", "aiohttp", "starlette", "uvicorn"}),
        ("import agentlightning as agl; agl.SQLiteLightningStore", {"pymongo", "psycopg", "aiohttp", "starlette"}),
        ("import agentlightning.cli", {"torch", "aiohttp", "starlette", "pydantic", "opentelemetry"}),
    ],
)
def test_each_part_loads_what_it_needs_and_no_more(statement: str, absent: set[str]) -> None:
    assert not modules_after(statement) & absent


def test_the_list_of_names_is_whole_and_can_be_seen() -> None:
    assert set(agl.__all__) <= set(dir(agl))
    assert len(agl.__all__) == len(set(agl.__all__))
    scope: dict[str, Any] = {}
    exec("from agentlightning import *", scope)
    assert set(agl.__all__) <= set(scope)


def test_the_version_is_the_one_that_client_and_server_compare() -> None:
    assert agl.__version__ == VERSION
    assert all(part.isdigit() for part in agl.__version__.split(".")[:2])


def test_a_misspelt_name_is_told_the_right_one() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'; did you mean 'Trainer'"):
        getattr(agl, "Trainr")  # noqa: B009 -- the checker would see it


@pytest.mark.parametrize("name", ["Traner", "TrainerLegacy"])
def test_a_traceback_suggests_one_name_once(name: str) -> None:
    """Python adds a suggestion of its own to an error that knows where the name was looked for."""
    done = run_program("python", "-c", f"import agentlightning as agl; agl.{name}", code=1)
    assert done.stderr.lower().count("did you mean") == (name != "TrainerLegacy"), done.stderr


@pytest.mark.parametrize(
    "name",
    ["TrainerLegacy", "RedisLightningStore"],
)
def test_a_name_that_is_not_there_says_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"agentlightning.{name} does not exist\. .*agl\."):
        getattr(agl, name)


CONTRACT = {
    "agentlightning": (
        "AgentLightningClient AgentLightningServer Baseline ClientServerExecutionStrategy LitAgentRunner LLM "
        "NamedResources OtelTracer PromptTemplate ResourcesUpdate RolloutLegacy SharedMemoryExecutionStrategy Task "
        "TracerTraceToTriplet TraceToMessages Trainer Triplet"
    ),
    "agentlightning.adapter": "LlmProxyTraceToTriplet TraceAdapter TraceToMessages",
    "agentlightning.adapter.messages": "TraceToMessages",
    "agentlightning.adapter.triplet": "RewardMatchPolicy TracerTraceToTriplet TraceTree",
    "agentlightning.algorithm": "algo Algorithm APO Baseline FastAlgorithm GRPO",
    "agentlightning.algorithm.apo.apo": "APO",
    "agentlightning.algorithm.base": "Algorithm",
    "agentlightning.algorithm.decorator": "algo FunctionalAlgorithm",
    "agentlightning.algorithm.fast": "Baseline FastAlgorithm",
    "agentlightning.algorithm.utils": "batch_iter_over_dataset with_llm_proxy with_store",
    "agentlightning.cli": "main",
    "agentlightning.client": "AgentLightningClient DevTaskLoader",
    "agentlightning.config": "lightning_cli nullable_str",
    "agentlightning.emitter": "emit_exception emit_message emit_object",
    "agentlightning.emitter.annotation": "emit_annotation operation",
    "agentlightning.emitter.message": "get_message_value",
    "agentlightning.emitter.object": "get_object_value",
    "agentlightning.emitter.reward": "emit_reward get_rewards_from_span",
    "agentlightning.env_var": "LightningEnvVar resolve_bool_env_var resolve_int_env_var resolve_str_env_var",
    "agentlightning.execution.base": "AlgorithmBundle ExecutionStrategy RunnerBundle",
    "agentlightning.execution.client_server": "ClientServerExecutionStrategy",
    "agentlightning.execution.events": "ExecutionEvent MultiprocessingEvent ThreadingEvent",
    "agentlightning.execution.shared_memory": "SharedMemoryExecutionStrategy",
    "agentlightning.litagent": "LitAgent llm_rollout rollout",
    "agentlightning.litagent.decorator": "FunctionalLitAgent prompt_rollout",
    "agentlightning.llm_proxy": "LLMProxy",
    "agentlightning.logging": "DATE_FORMAT DEFAULT_FORMAT setup setup_module",
    "agentlightning.reward": "emit_reward find_final_reward find_reward_spans get_reward_value is_reward_span reward",
    "agentlightning.runner": "LitAgentRunner",
    "agentlightning.runner.base": "Runner",
    "agentlightning.runner.legacy": "LegacyAgentRunner",
    "agentlightning.semconv": (
        "AGL_ANNOTATION AGL_REWARD LightningResourceAttributes LightningSpanAttributes LinkPydanticModel "
        "RewardPydanticModel"
    ),
    "agentlightning.server": "AgentLightningServer",
    "agentlightning.store": "LightningStore LightningStoreCapabilities",
    "agentlightning.store.base": "LightningStore LightningStoreCapabilities UNSET",
    "agentlightning.store.client_server": "LightningStoreClient LightningStoreServer",
    "agentlightning.store.memory": "InMemoryLightningStore",
    "agentlightning.store.mongo": "MongoLightningStore",
    "agentlightning.store.postgres": "PostgresLightningStore",
    "agentlightning.store.sqlite": "SQLiteLightningStore",
    "agentlightning.store.threading": "LightningStoreThreaded",
    "agentlightning.tracer": "Tracer",
    "agentlightning.tracer.agentops": "AgentOpsTracer",
    "agentlightning.tracer.base": "clear_active_tracer get_active_tracer set_active_tracer Tracer",
    "agentlightning.tracer.dummy": "DummyTracer",
    "agentlightning.tracer.otel": "OtelTracer",
    "agentlightning.tracer.weave": "WeaveTracer",
    "agentlightning.trainer": "build_component Trainer",
    "agentlightning.trainer.init_utils": "build_component instantiate_component instantiate_from_spec load_class",
    "agentlightning.trainer.registry": "ExecutionStrategyRegistry",
    "agentlightning.types": (
        "Attempt AttemptedRollout AttemptStatus Dataset EnqueueRolloutRequest Event Hook LLM NamedResources "
        "OtelResource PaginatedResult PromptTemplate ProxyLLM ResourcesUpdate Rollout RolloutConfig RolloutStatus "
        "Span SpanContext SpanCoreFields SpanLike TaskInput TraceStatus Worker"
    ),
    "agentlightning.types.tracer": "Span SpanLike SpanNames",
    "agentlightning.utils.env": "resolve_bool_env_var resolve_int_env_var resolve_str_env_var",
    "agentlightning.utils.metrics": "MetricsBackend MultiMetricsBackend",
    "agentlightning.utils.otel": (
        "check_attributes_sanity extract_links_from_attributes extract_tags_from_attributes "
        "filter_and_unflatten_attributes filter_attributes flatten_attributes format_exception_attributes "
        "full_qualified_name get_tracer get_tracer_provider make_link_attributes make_tag_attributes "
        "query_linked_spans sanitize_attribute_value sanitize_attributes sanitize_list_attribute_sanity "
        "unflatten_attributes"
    ),
    "agentlightning.utils.otlp": "handle_otlp_export PROTOBUF_CT spans_from_proto Status",
    "agentlightning.utils.server_launcher": "LaunchMode PythonServerLauncher PythonServerLauncherArgs",
    "agentlightning.utils.system_snapshot": "system_snapshot",
}
"""Import paths of existing programs, and the names that they take from them."""


@pytest.mark.parametrize("path", sorted(CONTRACT))
def test_existing_programs_find_their_imports(path: str) -> None:
    module = importlib.import_module(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated names say so when they are imported
        assert [name for name in CONTRACT[path].split() if not hasattr(module, name)] == []


NAMED_BY_DOCUMENTS = (
    *("adapter.base", "algorithm.FastAlgorithm", "contrib.reward.agentos", "contrib.runner.agentos"),
    *("env_var.LightningEnvVar", "runner.agent", "trainer.trainer", "types.core"),
)


def test_each_path_is_an_attribute_after_the_bare_import() -> None:
    """In a fresh interpreter. Importing one module makes others attributes, so these are deleted between paths."""
    code = """
        import json, sys, warnings
        import agentlightning as agl

        warnings.simplefilter("ignore")  # some need vendors' packages, which warn
        failed = []
        for path in json.loads(sys.argv[1]):
            try:
                eval(path.replace("agentlightning", "agl", 1))
            except AttributeError as error:
                failed.append(str(error))
            for name in list(sys.modules):
                parent, _, leaf = name.rpartition(".")
                if parent.startswith("agentlightning") and "__getattr__" in vars(sys.modules[parent]):
                    vars(sys.modules[parent]).pop(leaf, None)
        print(json.dumps(failed))
    """
    named = {f"agentlightning.{name}" for name in NAMED_BY_DOCUMENTS}
    paths = sorted({*CONTRACT, *_documented_modules(), *named} - {"agentlightning"})
    assert json.loads(run_program("python", "-c", textwrap.dedent(code), json.dumps(paths)).stdout) == []


def _documented_modules() -> set[str]:
    stub = ast.parse((Path(agl.__file__).parent / "__init__.pyi").read_text())
    own = [line for line in stub.body if isinstance(line, ast.ImportFrom) and line.level]
    return {f"agentlightning.{name.name}" for line in own for name in line.names}


def test_the_package_says_that_it_is_typed_and_ships_its_stubs() -> None:
    root = Path(agl.__file__).parent
    assert (root / "py.typed").is_file()
    settings = tomllib.loads((root.parent / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert settings.pop("sbom-files")
    assert settings == {"packages": ["agentlightning"]}  # every file of the folder, but those that git ignores
    files = [str(path) for path in [root / "py.typed", *root.rglob("*.pyi")]]
    assert subprocess.run(["git", "check-ignore", *files], cwd=root, capture_output=True, check=False).stdout == b""


@pytest.mark.parametrize(
    "package",
    ["algorithm", "execution", "store", "tracer", "trainer"],
)
def test_lazy_packages_offer_all_they_list(package: str) -> None:
    module = __import__(f"agentlightning.{package}", fromlist=["*"])
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = module.Nothing


def test_no_module_depends_on_itself() -> None:
    """The largest import cycle is one module; imports for type checkers count, too."""
    graph = grimp.build_graph("agentlightning")
    below = {module: graph.find_upstream_modules(module) for module in graph.modules}
    assert [(module, other) for module in below for other in below[module] if module in below[other]] == []


DOCUMENTED = {"_exit", "_getframe", "_current_frames", "_asdict", "_enter_task", "_leave_task", "_thread"}
"""Names with an underscore that the manual of Python describes, as `os._exit`, and those for makers of event loops."""
WITHOUT_PUBLIC_NAME = {
    "_TRACER_PROVIDER": "tracer/provider.py: a stand-in that leaves a program its one call of `set_tracer_provider`",
    "_active_span_processor": "utils/otel.py: the processors of a provider",
    "_span_processors": "utils/otel.py: the same",
    "_actions": "config.py: an option of argparse that help does not show",
    "_attn_implementation": "training/learner/forward.py: the attention that a model of transformers runs",
    "_cdata": "training/learner/memory.py: the storage that tensors share",
    "_merge_env": "environments/harbor/bubblewrap.py: the variables of a command, which Harbor offers to no other name",
    "_separate_verifier_session_id": "environments/harbor/trial_folder.py: the container of a verifier, by its name",
    "_is_mkldnn_bf16_supported": "engine/served.py: whether this processor multiplies in bfloat16",
    "_save_checkpoint": "training/external/trl/session.py: TRL's own checkpoint at a step of ours",
    "_threads_queues": "execution/children.py: a forked process must not join the executors' threads, which it lacks",
    "_resource_tracker": "utils/descendants.py: the helper processes of multiprocessing, which are spared",
    "_forkserver": "utils/descendants.py: the same",
    "_forkserver_pid": "utils/descendants.py: the same",
    "_selector": "utils/concurrency/main_thread.py: whether a loop has a server, which a blocking agent would stop",
    "_set_running_loop": "utils/concurrency/main_thread.py: asyncio lists it for makers of event loops",
}
"""Private names of other packages that are read, and where and why."""


def test_no_private_name_of_another_package_is_read_but_those_that_are_listed() -> None:
    root = Path(agl.__file__).parent
    trees = {path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in root.rglob("*.py")}
    own: set[str] = set()
    reads: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            names: list[str] = []
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    own.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    own.add(name)
                case (
                    ast.Attribute(attr=name)
                    | ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_])
                ):
                    names = [name]
                case ast.Import(names=modules):
                    names = [part for module in modules for part in module.name.split(".")]
                case ast.ImportFrom(module=str(module), names=found) if not module.startswith("agentlightning"):
                    names = [*module.split("."), *(each.name for each in found)]
                case _:
                    continue
            for name in names:
                if name.startswith("_") and not name.endswith("__"):
                    reads.setdefault(name, set()).add(file)
    own -= {"_TRACER_PROVIDER"}  # set, too
    types_only = {"_typeshed", "_internal", "_model_construction"}
    foreign = {name: files for name, files in reads.items() if name not in own | DOCUMENTED | types_only}
    assert foreign == {name: {why.partition(":")[0]} for name, why in WITHOUT_PUBLIC_NAME.items()}
