"""Patches that wait for an import: in an interpreter of its own, with a package that is imported late, or never."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "late_package").mkdir()
    (tmp_path / "late_package" / "__init__.py").write_text(
        "class Client:\n    def ask(self):\n        return 'asked'\n"
    )
    return tmp_path


def _run(package: Path, program: str) -> str:
    head = """
        import sys
        sys.path.insert(0, {path!r})
        from agentlightning.instrumentation.patching import OnImport
        def louder(original):
            return lambda self: original(self).upper()
        patch = OnImport("late_package", ("late_package", "Client.ask", louder))
        finders = list(sys.meta_path)
    """
    text = textwrap.dedent(head).format(path=str(package)) + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-W", "error", "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_package_is_patched_when_it_is_imported_and_is_not_imported_for_it(package: Path) -> None:
    program = """
        patch.apply()
        assert "late_package" not in sys.modules
        import late_package
        assert late_package.Client().ask() == "ASKED"
        assert type(late_package.__loader__).__name__ == "SourceFileLoader"
        assert sys.meta_path == finders
        patch.restore()
        assert late_package.Client().ask() == "asked"
    """
    _run(package, program)


def test_one_that_is_there_is_patched_at_once_and_the_last_user_takes_it_back(package: Path) -> None:
    program = """
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
    """
    _run(package, program)


def test_one_that_never_comes_leaves_nothing(package: Path) -> None:
    program = """
        patch.apply()
        assert len(sys.meta_path) == len(finders) + 1
        patch.restore()
        assert sys.meta_path == finders
        import late_package
        assert late_package.Client().ask() == "asked"
    """
    _run(package, program)


def test_one_that_is_made_otherwise_works_as_ever_and_is_told_of(package: Path) -> None:
    (package / "late_package" / "__init__.py").write_text("answer = 42\n")
    program = """
        import logging
        logging.basicConfig(stream=sys.stdout)
        patch.apply()
        import late_package
        assert late_package.answer == 42
        patch.restore()
    """
    assert "late_package are not traced" in _run(package, program)


def test_what_another_has_replaced_since_stays(package: Path) -> None:
    program = """
        import late_package
        patch.apply()
        theirs = lambda self: "theirs"
        late_package.Client.ask = theirs
        patch.restore()
        assert late_package.Client.ask is theirs
    """
    _run(package, program)


def test_a_tracer_imports_neither_client() -> None:
    program = (
        "import sys, agentlightning as agl\n"
        "with agl.OtelTracer().lifespan():\n    pass\n"
        "print(sorted({'openai', 'anthropic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
