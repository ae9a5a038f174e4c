"""Patches that wait for an import: in an interpreter of its own, with a package that is imported late, or never."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.stubs.processes import run_program

HEAD = """
import sys
from agentlightning.instrumentation.patching import OnImport
def louder(original):
    return lambda self: original(self).upper()
patch = OnImport("late_package", ("late_package", "Client.ask", louder))
finders = list(sys.meta_path)
"""
PACKAGE = "class Client:\n    def ask(self):\n        return 'asked'\n"
PROGRAMS = {
    "a package is patched when it is imported and is not imported for it": """
        patch.apply()
        assert "late_package" not in sys.modules
        import late_package
        assert late_package.Client().ask() == "ASKED"
        assert type(late_package.__loader__).__name__ == "SourceFileLoader"
        assert sys.meta_path == finders
        patch.restore()
        assert late_package.Client().ask() == "asked"
    """,
    "one that is there is patched at once and the last user takes it back": """
        import late_package
        patch.apply()
        patch.apply()
        assert late_package.Client().ask() == "ASKED"
        patch.restore()
        assert late_package.Client().ask() == "ASKED"
        patch.restore()
        assert late_package.Client().ask() == "asked"
        patch.restore()
        patch.apply()
        assert late_package.Client().ask() == "ASKED"
    """,
    "one that never comes leaves nothing": """
        patch.apply()
        assert len(sys.meta_path) == len(finders) + 1
        patch.restore()
        assert sys.meta_path == finders
        import late_package
        assert late_package.Client().ask() == "asked"
    """,
    "what another has replaced since stays": """
        import late_package
        patch.apply()
        theirs = lambda self: "theirs"
        late_package.Client.ask = theirs
        patch.restore()
        assert late_package.Client.ask is theirs
    """,
    "one that is made otherwise works as ever and is told of": """
        import logging
        logging.basicConfig(stream=sys.stdout)
        patch.apply()
        import late_package
        assert late_package.answer == 42
        patch.restore()
    """,
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_patch_waits_for_its_package(case: str, tmp_path: Path) -> None:
    is_other = "otherwise" in case
    (tmp_path / "late_package.py").write_text("answer = 42\n" if is_other else PACKAGE)
    program = HEAD + textwrap.dedent(PROGRAMS[case])
    printed = run_program("python", "-W", "error", "-c", program, folder=tmp_path).stdout
    assert ("late_package are not recorded" in printed) == is_other


def test_a_tracer_imports_neither_client() -> None:
    program = (
        "import sys, agentlightning as agl\n"
        "with agl.OtelTracer().lifespan():\n    pass\n"
        "print(sorted({'openai', 'anthropic'} & set(sys.modules)))"
    )
    assert run_program("python", "-c", program).stdout.strip() == "[]"
