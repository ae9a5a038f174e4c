"""Which names look as if a secret were behind them."""

from __future__ import annotations

import pytest

from agentlightning.utils.secret_names import looks_secret, without_secrets


@pytest.mark.parametrize(
    "name",
    [
        "api_key", "apikey", "apiKey", "API_KEY", "x-api-key", "openai.api_key", "OPENAI_API_KEY", "llm.openaiApiKey",
        "authorization", "Authorization", "http.request.header.authorization", "http.request.header.authorization.0",
        "Proxy-Authorization", "http.request.header.x_api_key", "cookie", "Set-Cookie", "password", "db.password",
        "PASSWD", "secret", "client_secret", "clientSecret", "aws_secret_access_key", "access_token", "accessToken",
        "refresh-token", "auth.token", "HF_TOKEN", "github_token", "AGL_TOKEN", "private_key", "credentials",
    ],
)  # fmt: skip
def test_names_of_secrets_are_recognised(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "", "key", "token", "gen_ai.usage.prompt_tokens", "gen_ai.request.max_tokens", "response_token_ids",
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
