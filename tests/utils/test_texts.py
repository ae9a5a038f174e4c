"""Keys that are known by their shape."""
# ruff: noqa: E501 -- one case a line

from __future__ import annotations

import pytest

from agentlightning.types.attempt_key import attempt_key
from agentlightning.utils.texts import attributes_without_keys, without_keys

A, B = "a1B2c3D4e5F6g7H8i9J0" * 2, "A1B2C3D4E5F6G7H8"
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{A}\n{A}\n-----END RSA PRIVATE KEY-----"
KEYS = [
    f"sk-{A}", f"sk-proj-{A}_{A}", f"sk-ant-api03-{A}", f"ghp_{A}", f"github_pat_{A}", f"AKIA{B}", f"ASIA{B}",
    f"xoxb-123-{A}", f"hf_{A}", f"AIza{A[:35]}", f"eyJ{A}.eyJ{A}.{A}", f"glpat-{A}", PEM,
    PEM.replace("RSA ", ""), attempt_key("ro-1", "at-1", "a-token-of-some-length"),
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key[:6])
@pytest.mark.parametrize("text", ["{}", "say {}, please", 'export KEY="{}"\n', "({})", '{{"k":"{}"}}'])
def test_a_key_is_hidden_in_any_text_and_equal_ones_stay_equal(key: str, text: str) -> None:
    text_with_key = text.format(key)
    shown = without_keys(text_with_key)
    assert key not in shown
    assert A[:12] not in shown
    before, after = text_with_key.split(key)
    assert shown.startswith(before)
    assert shown.endswith(after)
    assert shown == without_keys(text_with_key)
    first, second = without_keys(f"{key} & {key}").split(" & ")
    assert first == second


@pytest.mark.parametrize(
    "text",
    [
        "", "sk-learn", "task-12345678901234567890123", "sk-learn-is-a-library-for-machine-learning", "eyJ", "AKIA", "hf_model",
        "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----", "the xox game", "AIzawa", "agl-runner", "disk-" + A,
    ],
)  # fmt: skip
def test_other_texts_stay_the_same_object(text: str) -> None:
    assert without_keys(text) is text


def test_attributes_say_which_were_changed_and_numbers_stay() -> None:
    ids = list(range(1000))
    result = attributes_without_keys({"a": f"sk-{A}", "l": ["x", f"ghp_{A}"], "ids": ids, "n": 1, "t": "text"})
    assert result is not None
    new_attributes, changed = result
    assert changed == ["a", "l"]
    assert new_attributes["ids"] is ids
    assert attributes_without_keys({"ids": ids, "t": "text"}) is None


@pytest.mark.parametrize(
    "piece", ["sk-", "eyJ", "eyJ-", "eyJaaaaaaaaaa.", "-----BEGIN PRIVATE KEY", "AKIA", "xoxb-", "agl-a.", "://a:", "a"]
)
def test_repeated_beginnings_of_keys_end(piece: str) -> None:
    text = piece * (4_000_000 // len(piece))
    assert len(without_keys(text)) <= len(text)
