"""Runs the Node programs of `programs/` as agents; their packages are those that `environments.py` has installed."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.frameworks.suite import PRODUCTS
from tests.stubs.processes import run_program

OBJECTS = [product.model_dump() for product in PRODUCTS]
MODULES = Path(os.environ.get("AGL_TEST_NODE_MODULES", "not set"))

needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not MODULES.is_dir(),
    reason="node or the packages of package.json is not installed: make test-frameworks",
)


@functools.cache
def programs() -> Path:
    """Return the folder of the programs, copied beside the packages that they import."""
    home = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, home)
    (home / "node_modules").symlink_to(MODULES)
    return shutil.copytree(Path(__file__).parent / "programs", home / "programs")


def program(task: str, llm: agl.LLM, command: str) -> Any:
    """Run a program, named with its arguments, for a task and return the last line that it prints, which is JSON."""
    url, key = llm.get_base_url(), llm.api_key or "unused"
    environment = {
        "PATH": os.environ["PATH"],
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "MODEL": llm.model,
        "TASK": task,
    }
    words = ["node", *command.split()]
    done = run_program(*words, folder=programs(), environment=environment)
    return json.loads(done.stdout.splitlines()[-1])  # some packages print warnings
