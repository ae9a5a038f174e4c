"""A secret is hidden by its name, by its shape and by its value, wherever it stands in JSON data."""

# ruff: noqa: E501

from __future__ import annotations

import json
import traceback

import pytest

from agentlightning.base.process_secrets import hold
from agentlightning.utils.masking import looks_secret, masked, masked_text, without_secrets

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
    result = masked({"note": f"cannot log in with {SECRET}!", SECRET: [f"{SECRET}{SECRET}"]})
    assert SECRET not in json.dumps(result)
    assert result["note"] == "cannot log in with [hidden]!"


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


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "api_key", "apikey", "apiKey", "API_KEY", "x-api-key", "openai.api_key", "OPENAI_API_KEY", "llm.openaiApiKey",
        "authorization", "Authorization", "http.request.header.authorization", "http.request.header.authorization.0",
        "Proxy-Authorization", "http.request.header.x_api_key", "cookie", "Set-Cookie", "password", "db.password",
        "PASSWD", "secret", "client_secret", "clientSecret", "aws_secret_access_key", "access_token", "accessToken",
        "refresh-token", "auth.token", "token", "auth", "pwd", "bearer", "jwt", "dsn", "pass", "sas", "session", "cookies",
        "x-goog-api-key", "X-Functions-Key", "x_my_own_key", "SENTRY_DSN", "connection_string", "api_keys", "db.pwd", "myToken", "HF_TOKEN", "github_token", "AGL_TOKEN", "private_key", "credentials",
    ],
)  # fmt: skip
def test_names_of_secrets_are_recognised(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "", "key", "tokens", "eos_token", "pad_token", "choices.0.logprobs.content.0.token", "session.id", "total_tokens", "gen_ai.usage.prompt_tokens", "gen_ai.request.max_tokens", "response_token_ids",
        "gen_ai.prompt.0.content", "secretary", "password_attempts", "monkey", "primary_key", "agentlightning.reward",
        "cookies_baked", "keyboard", "api_key_count", "author", "http.request.header.content-type",
    ],
)  # fmt: skip
def test_other_names_are_not(name: str) -> None:
    assert not looks_secret(name)


def test_values_under_such_names_are_hidden_at_any_depth_and_numbers_stay() -> None:
    values = {"model": "m", "extra": {"headers": {"Authorization": "Bearer x"}, "n": 1}, "api_key": None, "password": 3}
    assert without_secrets(values) == {
        "model": "m",
        "extra": {"headers": {"Authorization": "[hidden]"}, "n": 1},
        "api_key": None,
        "password": 3,
    }
    assert values["extra"]["headers"]["Authorization"] == "Bearer x"  # type: ignore[index]  # the original is untouched


def test_nothing_to_hide_costs_no_copy() -> None:
    assert without_secrets({"a": {"b": 1}, "c": ["d"]}) is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([{"password": "P"}], [{"password": "[hidden]"}]),
        ({"a": ({"b": [{"token": "P"}]},)}, {"a": [{"b": [{"token": "[hidden]"}]}]}),
        ([["Authorization", "Bearer P"], ["accept", "x"]], [["Authorization", "[hidden]"], ["accept", "x"]]),
        (("x-api-key", "P"), ["x-api-key", "[hidden]"]),
        ([{"name": "Cookie", "value": "P"}], [{"name": "Cookie", "value": "[hidden]"}]),
        ({"key": "password", "value": "P"}, {"key": "password", "value": "[hidden]"}),
        ("postgresql://me:P@host/db", "postgresql://me:[hidden]@host/db"),
        ("GET http://h/a?key=P&x=1&api_key=P", "GET http://h/a?key=[hidden]&x=1&api_key=[hidden]"),
        ("Authorization: Bearer P, accept: x", "Authorization: [hidden], accept: x"),
        ("user=me password=P; port=1", "user=me password=[hidden]; port=1"),
        ('{"user": "me", "auth": {"token": "P"}}', '{"user": "me", "auth": "[hidden]"}'),
        ('{"a": {"jwt": "P"}, "n": 1.50}', '{"a": {"jwt": "[hidden]"}, "n": 1.5}'),
        (["curl", "-H", "X-Api-Key: P"], ["curl", "-H", "X-Api-Key: [hidden]"]),
        ({"token": "Hello", "logprob": -0.5, "top": [{"token": "Hi", "logprob": -1.0}]}, None),
        ([1, 2, 3], None),
        ("a plain text: nothing", None),
        ('{"model": "m", "n": 1.50}', None),
    ],
)
def test_secrets_are_hidden_in_lists_pairs_addresses_and_short_texts(value: object, shown: object) -> None:
    cleaned = without_secrets({"kept": value})
    assert cleaned == (None if shown is None else {"kept": shown})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("login failed: api_key=abcdefgh", "login failed: api_key=[hidden]"),
        ("a: b: password: c", "a: b: password: [hidden]"),
        ("cause='bad token=abc'", "cause='bad token=[hidden]'"),
        ("x=y=z", "x=y=z"),
        ('{"task": 1, "api_key": "cut o', '{"task": 1, "api_key": "[hidden]"'),
        ('{"password": "with \\"quotes\\"", "n": ', '{"password": "[hidden]", "n": '),
        (r'got "{\"api_key\": \"abc\"}"', r'got "{\"api_key\": [hidden]\"}"'),
        ("password='" + "p" * 9000 + "' n=1", "password='[hidden]' n=1"),
    ],
)
def test_a_name_within_what_another_name_stands_for_counts_too(text: str, shown: str) -> None:
    assert (without_secrets({"m": text}) or {"m": text})["m"] == shown


@pytest.mark.parametrize(
    "line",
    [
        "client = OpenAI(base_url=url, api_key=llm.api_key)",
        'client = OpenAI(base_url=url, api_key=llm.api_key or "unused")',
        "model=llm.model, api_key=self.llm.api_key, timeout=3",
        "self.api_key = settings.api_key",
    ],
)
def test_an_attribute_of_the_same_name_in_the_source_code_of_a_traceback_is_not_a_value(line: str) -> None:
    frames = f'  File "agent.py", line 7, in agent\n    {line}\n    ^^^^^^\n'
    trace = f"Traceback (most recent call last):\n{frames}ValueError: api_key=llm.api_key"
    assert masked_text(trace) == trace.removesuffix("llm.api_key") + "[hidden]"


@pytest.mark.parametrize(
    "value",
    [
        f'"{SECRET}"',
        SECRET,
        f"a.{SECRET}",
        "eyJhbGciOiJI.eyJzdWIiOiI.SflKxwRJSM",
        "my.password",
        "llm.api_key!",
        "api_key",
    ],
)
def test_other_values_in_a_traceback_are_hidden(value: str) -> None:
    trace = f'  File "agent.py", line 7, in agent\n    client = OpenAI(api_key={value}, url=url)\nValueError: no'
    assert f"{value}," not in masked_text(trace)
    assert "url=url)\nValueError: no" in masked_text(trace)


def test_an_error_with_a_key_of_its_model_keeps_its_source_code() -> None:
    class Model:
        api_key = None

    llm = Model()
    with pytest.raises(TypeError) as raised:
        dict([1], api_key=llm.api_key)  # type: ignore[call-overload]
    trace = "".join(traceback.format_exception(raised.value))
    assert "dict([1], api_key=llm.api_key)" in masked_text(trace)


def test_a_text_of_many_names_is_read_once() -> None:
    text = "a=" * 8000
    assert without_secrets({"m": text}) is None


def test_flattened_headers_are_hidden_by_their_neighbour() -> None:
    flat = {"h.0.0": "Authorization", "h.0.1": "Bearer P", "h.1.0": "accept", "h.1.1": "x"}
    assert without_secrets(flat) == {**flat, "h.0.1": "[hidden]"}
    named = {"h.0.name": "x-api-key", "h.0.value": "P", "h.1.name": "accept", "h.1.value": "x"}
    assert without_secrets(named) == {**named, "h.0.value": "[hidden]"}


def test_what_agent_and_model_said_is_not_searched_for_names() -> None:
    texts = {"gen_ai.prompt.0.content": "my password: open sesame", "gen_ai.completion.0.content": '{"token": "a"}'}
    assert without_secrets(texts) is None


def test_depth_and_length_are_bounded() -> None:
    deep: object = "P"
    for _ in range(5000):
        deep = {"a": [deep]}
    shown = str(without_secrets({"kept": deep}))
    assert "P" not in shown
    assert shown.count("[hidden]") == 1
    assert without_secrets({"a": "x=y:" * 1_000_000, "b": "[" * 16_000, "c": "a" * 16_000 + "="}) is None
