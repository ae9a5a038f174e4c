"""`agl.TRL` before it runs: what is missing is said at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

import agentlightning as agl


def test_a_bare_name_says_which_setting_is_missing_and_loads_no_training_stack() -> None:
    program = (
        "import sys, agentlightning as agl\n"
        "try:\n    agl.Trainer(algorithm='trl', store=agl.InMemoryLightningStore())\n"
        "except TypeError as error:\n    print(error)\n"
        "print([name for name in ('torch', 'trl', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    message, loaded = done.stdout.splitlines()
    assert "model" in message
    assert "missing" in message
    assert loaded == "[]"


def test_without_trl_the_extra_is_named() -> None:
    try:
        import trl  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        pass
    else:
        pytest.skip("trl is installed here")
    with pytest.raises(ImportError, match=r"agl-framework\[trl\]"):
        agl.TRL(model="m")
