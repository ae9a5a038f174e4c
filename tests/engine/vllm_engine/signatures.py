"""The parts of vLLM in use, read from the source of the real package: fields, routes, arguments, variables, metrics.

`python -m tests.engine.vllm_engine.signatures WHEEL` writes `vllm_signatures.json` from a wheel of vLLM; with
`--check` it compares, and fails where vLLM has changed what is used. Nothing of the wheel is run: it needs a GPU.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name("vllm_signatures.json")

CLASSES = {
    "entrypoints/openai/chat_completion/protocol.py": (
        "ChatCompletionLogProb",
        "ChatCompletionLogProbs",
        "ChatCompletionLogProbsContent",
        "ChatCompletionRequest",
        "ChatCompletionResponse",
        "ChatCompletionResponseChoice",
        "ChatCompletionResponseStreamChoice",
        "ChatCompletionStreamResponse",
    ),
    "entrypoints/serve/lora/protocol.py": ("LoadLoRAAdapterRequest",),
    "distributed/weight_transfer/ipc_engine.py": ("IPCTrainerInitInfo",),
}
"""Classes whose fields are stored, with the text of their types."""
ROUTES = (
    "entrypoints/serve/dev/sleep/api_router.py",
    "entrypoints/serve/dev/cache/api_router.py",
    "entrypoints/serve/dev/rpc/api_router.py",
    "entrypoints/serve/lora/api_router.py",
    "entrypoints/rl/online/api_router.py",
    "entrypoints/serve/instrumentator/health.py",
    "entrypoints/serve/instrumentator/basic.py",
    "entrypoints/openai/models/api_router.py",
    "entrypoints/openai/chat_completion/api_router.py",
)
FUNCTIONS = {
    "distributed/weight_transfer/base.py": ("ModuleSource.__init__", "TrainerWeightTransferEngine.send_weights"),
    "distributed/weight_transfer/clients.py": ("HTTPVLLMWeightSyncClient.__init__",),
    "distributed/weight_transfer/factory.py": ("WeightTransferTrainerFactory.trainer_init",),
    "v1/worker/gpu_model_runner.py": ("GPUModelRunner.reload_weights",),
}
ARGUMENTS = ("engine/arg_utils.py", "entrypoints/openai/cli_args.py", "entrypoints/common/cli_args.py")
METRICS = "v1/metrics/loggers.py"
VARIABLES = "envs.py"


def signatures_of(wheel: Path) -> dict[str, Any]:
    """Return the parts of a wheel of vLLM that are in use."""
    with zipfile.ZipFile(wheel) as package:
        names = set(package.namelist())

        def tree(path: str) -> ast.Module:
            return ast.parse(package.read(f"vllm/{path}")) if f"vllm/{path}" in names else ast.Module([], [])

        classes: dict[str, dict[str, str]] = {}
        for path, class_names in CLASSES.items():
            classes |= {node.name: _fields(node) for node in _classes(tree(path)) if node.name in class_names}
        routes: dict[str, list[str]] = {}
        for path in ROUTES:
            routes |= _routes(tree(path))
        functions: dict[str, list[str]] = {}
        for path, paths in FUNCTIONS.items():
            functions |= _functions(tree(path), paths)
        texts = {text for path in ARGUMENTS for text in _texts(tree(path))}
        for node in (node for path in ARGUMENTS for node in _classes(tree(path)) if "FrontendArgs" in node.name):
            texts |= {f"--{name.replace('_', '-')}" for name in _fields(node)}
        return {
            "vllm": wheel.name.split("-")[1],
            "classes": dict(sorted(classes.items())),
            "routes": dict(sorted(routes.items())),
            "functions": dict(sorted(functions.items())),
            "arguments": sorted(text for text in texts if text.startswith("--") and " " not in text),
            "variables": sorted(
                text for text in _texts(tree(VARIABLES)) if text.startswith("VLLM_") and text.isupper()
            ),
            "metrics": sorted(text for text in _texts(tree(METRICS)) if text.startswith("vllm:")),
        }


def _classes(module: ast.Module) -> list[ast.ClassDef]:
    return [node for node in module.body if isinstance(node, ast.ClassDef)]


def _fields(node: ast.ClassDef) -> dict[str, str]:
    return {
        line.target.id: ast.unparse(line.annotation)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def _routes(module: ast.Module) -> dict[str, list[str]]:
    queries: dict[str, list[str]] = {}
    for node in ast.walk(module):
        if not isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if not isinstance(mark, ast.Call) or not isinstance(mark.func, ast.Attribute) or not mark.args:
                continue
            path = mark.args[0]
            if mark.func.attr in ("get", "post") and isinstance(path, ast.Constant):
                names = [argument.arg for argument in node.args.args]
                query = [name for name in names if name not in ("raw_request", "request")]
                query += [text for text in _texts(node) if text == "tags"][:1]
                queries[f"{mark.func.attr.upper()} {path.value}"] = query
    return queries


def _functions(module: ast.Module, names: Sequence[str]) -> dict[str, list[str]]:
    parameters: dict[str, list[str]] = {}
    for node in _classes(module):
        for line in node.body:
            if isinstance(line, ast.FunctionDef) and f"{node.name}.{line.name}" in names:
                arguments = [*line.args.args, *line.args.kwonlyargs]
                parameters[f"{node.name}.{line.name}"] = [a.arg for a in arguments if a.arg not in ("self", "cls")]
    return parameters


def _texts(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def main() -> int:
    """Write the file, or compare with it."""
    parser = argparse.ArgumentParser(prog="signatures")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with what is stored")
    options = parser.parse_args()
    signatures = signatures_of(options.wheel)
    if not options.check:
        STORED.write_text(json.dumps(signatures, indent=1) + "\n")
        return 0
    lost = lost_entries(json.loads(STORED.read_text()), signatures)
    print("\n".join(lost) or f"vLLM {signatures['vllm']} offers all that is stored")
    return 1 if lost else 0


def lost_entries(stored: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the entries that are stored and missing, a line each. Additions of a later version do no harm."""
    lines: list[str] = []
    for name in ("classes", "routes", "functions", "arguments", "variables", "metrics"):
        for entry in sorted(_entries(stored[name]) - _entries(new[name])):
            lines.append(f"{name}: vLLM {new['vllm']} has no longer {entry}")
    return lines


def _entries(value: dict[str, Any] | list[str]) -> set[str]:
    if isinstance(value, list):
        return set(value)
    parts = {key: under if isinstance(under, dict) else dict.fromkeys(under, "") for key, under in value.items()}
    return {*value, *(f"{key}.{name} {kind}".strip() for key, under in parts.items() for name, kind in under.items())}


if __name__ == "__main__":
    sys.exit(main())
