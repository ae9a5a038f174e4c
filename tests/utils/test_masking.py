"""A secret is hidden by its name, by its shape and by its value, wherever it stands in JSON data."""

from __future__ import annotations

import json

import pytest

from agentlightning.process_secrets import hold
from agentlightning.utils.masking import masked, masked_text

SECRET = "correct-horse-battery"


@pytest.mark.parametrize(
    "data",
    [
        {"api_key": SECRET},
        {"headers": {"Authorization": f"Bearer {SECRET}"}},
        {"headers": [["authorization", SECRET]]},
        {"endpoint": f"https://host/v1?token={SECRET}&x=1"},
        {"endpoint": f"https://user:{SECRET}@host/v1"},
        {"env": {"MY_SERVICE_PASSWORD": SECRET}},
        {"command": f"run --flag X_API_KEY={SECRET}"},
        {"deep": [{"deeper": ({"client_secret": SECRET},)}]},
    ],
)
def test_a_secret_under_its_name_is_hidden(data: dict[str, object]) -> None:
    assert SECRET not in json.dumps(masked(data))


def test_a_value_that_the_environment_names_as_secret_is_hidden_where_no_name_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_DATABASE_PASSWORD", SECRET)
    told = masked({"note": f"cannot log in with {SECRET}!", SECRET: [f"{SECRET}{SECRET}"]})
    assert SECRET not in json.dumps(told)
    assert told["note"] == "cannot log in with [hidden]!"


def test_a_secret_that_this_process_holds_is_hidden_and_short_words_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    hold("AGL_PLANTED_TEST", SECRET)
    monkeypatch.setenv("USE_AUTH", "yes")
    try:
        assert masked_text(f"yes, {SECRET} it is") == "yes, [hidden] it is"
    finally:
        hold("AGL_PLANTED_TEST", "")


def test_what_every_shell_sets_and_names_of_files_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/work/project")
    monkeypatch.setenv("DESKTOP_SESSION", "environment")
    monkeypatch.setenv("MY_CREDENTIALS", __file__)
    text = f"/work/project environment {__file__}"
    assert masked_text(text) == text


def test_a_key_is_known_by_its_shape() -> None:
    key = "sk-proj-abcdefghij0123456789abcd"
    assert key not in masked_text(f"401 for {key}")


def test_what_is_no_secret_stays_as_it_is() -> None:
    data = {"loss": 0.5, "steps": 3, "token_ids": [1, 2], "none": None, "flag": True, "texts": ["a", {"b": "c=d"}]}
    assert masked(data) == data
    assert masked((1, 2)) == [1, 2]
