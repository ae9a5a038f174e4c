"""Specs: every form becomes a component, and every wrong one an error that says what was meant."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest

import agentlightning as agl
from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.fast import Baseline
from agentlightning.store.spec import FORMS
from agentlightning.trainer.init_utils import build_component, instantiate_component, instantiate_from_spec, load_class
from tests.trainer.parts import Needy

REGISTRY = {"baseline": "agentlightning.algorithm.fast.Baseline", "needy": Needy}


def build(spec: Any, **options: Any) -> Any:
    return build_component(
        spec, **{"expected_type": Algorithm, "spec_name": "algorithm", "registry": REGISTRY, **options}
    )


def test_an_instance_is_returned_as_it_is() -> None:
    baseline = Baseline()
    assert build(baseline) is baseline


@pytest.mark.parametrize(
    "spec",
    [
        Baseline,
        lambda: Baseline(),
        "baseline",
        "Baseline",
        "agentlightning.algorithm.fast.Baseline",
        {"type": "baseline"},
        {"name": "BASELINE"},
        {"type": Baseline},
        {"type": "agentlightning.Baseline", "n_epochs": 1},
    ],
)
def test_every_form_of_a_spec_makes_the_component(spec: Any) -> None:
    assert type(build(spec)) is Baseline


def test_none_makes_the_default_or_none_or_is_refused() -> None:
    assert type(build(None, default_factory=Baseline)) is Baseline
    assert build(None, allow_none=True) is None
    with pytest.raises(ValueError, match="algorithm cannot be None"):
        build(None)


def test_a_dict_without_a_type_configures_the_default_class_where_there_is_one() -> None:
    made = build({"n_epochs": 3}, registry=None, dict_requires_type=False, dict_default_cls=Baseline)
    assert made.n_epochs == 3


def test_a_dict_is_not_changed() -> None:
    spec = {"type": "baseline", "n_epochs": 2}
    build(spec)
    assert spec == {"type": "baseline", "n_epochs": 2}


def test_optional_defaults_fill_what_the_constructor_names_and_nobody_set() -> None:
    calls: list[str] = []

    def late(value: Any) -> Any:
        return lambda: calls.append("rate") or value

    assert build(Needy, optional_defaults={"rate": late(0.5), "unknown": 1}).rate == 0.5
    assert build({"type": Needy, "rate": 2.0}, optional_defaults={"rate": late(0.5)}).rate == 2.0
    assert calls == ["rate"]


def test_a_factory_gets_no_defaults() -> None:
    assert build(lambda: Needy(1.0), optional_defaults={"rate": 0.5}).rate == 1.0


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        (7, ValueError, "Invalid algorithm type: int. Expected Algorithm"),
        (int, ValueError, "Invalid algorithm type: class int"),
        (lambda: 7, TypeError, "algorithm factory returned int, which is not a Algorithm subclass"),
        (lambda store: store, ValueError, "a factory must take no arguments, but <lambda> requires store .*@agl.algo"),
        ("basline", ValueError, r"unknown name 'basline' \(did you mean 'baseline'\?\); .* one of 'baseline', 'needy'"),
        ("nowhere.at.All", ValueError, "there is no module 'nowhere'"),
        ("agentlightning.algorithm.fast.Baselin", ValueError, "has no 'Baselin'; did you mean 'Baseline'"),
        ("agentlightning.semconv.AGL_REWARD", TypeError, "expected a class or another callable"),
        ({}, ValueError, "dict must have a 'type' key"),
        ({"n_epochs": 1}, ValueError, "dict must have a 'type' key.*its keys are 'n_epochs'"),
        ({"name": "nobody"}, ValueError, "unknown name 'nobody'"),
        ({"type": 7}, ValueError, "'type' must be a class, an import path or one of"),
        ({"type": "baseline", "n_epoch": 1}, TypeError, "Baseline has no setting 'n_epoch'; did you mean 'n_epochs'"),
        ("needy", TypeError, r"Needy is missing required settings: rate\. Pass them in a dict: .*'rate': \.\.\."),
        (Needy, TypeError, "Needy is missing required settings: rate"),
        ({"type": "needy"}, TypeError, "required settings: rate"),
    ],
)
def test_a_wrong_spec_is_explained(spec: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        build(spec)


def test_messages_may_be_given() -> None:
    with pytest.raises(TypeError, match="got int, want Algorithm"):
        build(lambda: 7, type_error_fmt="got {type_name}, want {expected_type}")
    with pytest.raises(ValueError, match="int is no Algorithm"):
        build(7, invalid_spec_error_fmt="{actual_type} is no {expected_type}")


def test_instantiate_from_spec_takes_strings_and_dicts_only() -> None:
    with pytest.raises(TypeError, match="must be a string or dict"):
        instantiate_from_spec(Baseline)  # type: ignore[arg-type]


def test_an_import_string_may_name_a_function() -> None:
    assert instantiate_from_spec("tests.trainer.parts.here") > 0


def test_a_constructor_that_takes_any_keyword_receives_no_defaults() -> None:
    def anything(**settings: Any) -> dict[str, Any]:
        return settings

    assert instantiate_component(anything, {"a": 1}, {"b": 2}) == {"a": 1}


PARTS = ("store", "tracer", "adapter", "algorithm", "strategy", "runner", "trackers", "llm_proxy")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["price.db", "price.py", "price.data"])
def test_a_file_name_imports_nothing(part: str, name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "price.py").write_text("raise SystemExit('price.py ran')\n")
    (tmp_path / "price.data").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    hint = "; did you mean 'price.NAME', with a name from that file?" if name == "price.py" else ""
    text = f"{name!r} names a file, not an import path such as 'package.module.Name'{hint}"
    with pytest.raises(ValueError, match=re.escape(text)):
        agl.Trainer(**cast("Any", {part: {"type": name}}))
    if part == "store":
        text = f"{name!r} is not a store; expected one of: {', '.join(FORMS)}"
        text += "" if name == "price.py" else f"; did you mean 'sqlite:///{name}'?"
    with pytest.raises(ValueError, match=re.escape(text)):
        agl.Trainer(**cast("Any", {part: name}))


def test_a_module_that_fails_to_import_says_so_itself(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_installed.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        load_class("half_installed.Thing")
