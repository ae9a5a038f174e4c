"""agl.TRL, agl.VERL and agl.Tinker before a run: a missing setting or package is named at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest

import agentlightning as agl


@pytest.mark.timeout(600)  # on a busy machine VERL's environment is slow to start
@pytest.mark.parametrize(("name", "setting"), [("trl", "model"), ("verl", "config")])
def test_a_bare_name_says_which_setting_is_missing_and_loads_no_training_stack(name: str, setting: str) -> None:
    program = (
        "import sys, agentlightning as agl\n"
        f"try:\n    agl.Trainer(algorithm={name!r}, store=agl.InMemoryLightningStore())\n"
        "except TypeError as error:\n    print(error)\n"
        "print([name for name in ('torch', 'trl', 'verl', 'ray', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    message, loaded = done.stdout.splitlines()
    assert setting in message
    assert "missing" in message
    assert loaded == "[]"


@pytest.mark.parametrize(("name", "make"), [("trl", lambda: agl.TRL(model="m")), ("verl", lambda: agl.VERL({}))])
def test_without_its_package_the_extra_is_named(name: str, make: Callable[[], object]) -> None:
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    with pytest.raises(ImportError, match=rf"agl-framework\[{name}\]"):
        make()
