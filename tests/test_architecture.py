"""The picture of the packages is the contract that the tool checks, and no package is missing from it."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/deep-dive/architecture.md"
OUTSIDE = {"instrumentation"}
"""Packages without a layer, as the page says."""


def layers_of_the_contract() -> list[list[str]]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["name"].startswith("layers:")]
    return [sorted(name.strip().removeprefix("agentlightning.") for name in layer.split("|")) for layer in layers]


def layers_of_the_page() -> list[list[str]]:
    picture = re.search(r"<!-- layers -->\n\n```text\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert picture is not None
    names = [re.split(r"\s{2,}", line)[0] for line in picture.group(1).splitlines()]
    return [sorted(name.strip() for name in line.split("|")) for line in names]


def test_the_picture_of_the_packages_shows_the_layers_of_the_contract() -> None:
    assert layers_of_the_page() == layers_of_the_contract()


def test_every_package_is_in_the_picture() -> None:
    modules = {path.stem for path in (ROOT / "agentlightning").iterdir() if not path.name.startswith(("_", "."))}
    shown = {name for line in layers_of_the_page() for name in line}
    assert modules - {"py"} - shown == OUTSIDE


def test_no_folder_of_a_model_is_read_as_a_program() -> None:
    wrong: list[str] = []
    count = 0
    for path in (ROOT / "agentlightning").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr in ("from_pretrained", "from_config") and ast.unparse(node.func.value).startswith("Auto"):
                count += 1
                keywords = {each.arg: ast.unparse(each.value) for each in node.keywords}
                if keywords.get("trust_remote_code") != "False":
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong
    assert count > 5
