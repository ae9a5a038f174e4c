"""Under which names a server answers."""

from __future__ import annotations

import pytest

from agentlightning.utils.http.allowed_hosts import AllowedHosts, host_name


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_ALLOWED_HOSTS", raising=False)


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:4747", "localhost"),
        ("localhost.:4747", "localhost"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("[::1]:4747", "::1"),
        ("[::1]", "::1"),
        ("::1", "::1"),
        ("a.example:1:2", "a.example:1:2"),
        ("", ""),
    ],
)
def test_a_name_is_taken_out_of_a_header(header: str, name: str) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize("header", ["localhost", "localhost:1", "127.0.0.1:4747", "[::1]:4747", "LOCALHOST:9"])
@pytest.mark.parametrize("bind", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_a_loopback_server_answers_to_the_loopback_names_and_its_own(bind: str, header: str) -> None:
    hosts = AllowedHosts.of(bind, bind, None)
    assert hosts.allows(header)
    assert hosts.allows(f"[{bind}]:1" if ":" in bind else f"{bind}:1")


@pytest.mark.parametrize(
    "header",
    ["evil.example", "evil.example:4747", "localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.2", "",
     "0.0.0.0", "[::ffff:127.0.0.1]", "localhost@evil.example", "evil.example:localhost", "127.0.0.1, evil.example",
     "127.0.0.1:80@evil.example", "localhost:", "localhost:x", "localhost:1:2", "[::1]evil.example", "[::1",
     "[localhost]", "localhost:99999999", "localhost/", "localhost?", "localhost..", "127.0.0.1\xa0", "\x85localhost"],
)  # fmt: skip
def test_a_loopback_server_does_not_answer_to_any_other_name(header: str) -> None:
    assert not AllowedHosts.of("127.0.0.1", "127.0.0.1", None).allows(header)


def test_names_are_added_by_argument_or_by_environment_and_the_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_ALLOWED_HOSTS", "gpu-box, store.example:4747 ,,")
    from_environment = AllowedHosts.of("127.0.0.1", "127.0.0.1", None)
    assert all(from_environment.allows(name) for name in ("gpu-box:1", "STORE.example", "localhost"))
    hosts = AllowedHosts.of("127.0.0.1", "127.0.0.1", ["other"])
    assert hosts.allows("other")
    assert not hosts.allows("gpu-box")
    assert AllowedHosts.of("127.0.0.1", "127.0.0.1", "a,b").allows("b")


def test_a_star_allows_every_name() -> None:
    assert AllowedHosts.of("127.0.0.1", "127.0.0.1", "*").allows("evil.example")


def test_beyond_loopback_the_list_applies_only_if_there_is_one() -> None:
    assert AllowedHosts.of("0.0.0.0", "gpu-box", None).allows("anything")
    listed = AllowedHosts.of("0.0.0.0", "gpu-box", ["store.example"])
    assert [listed.allows(name) for name in ("store.example", "gpu-box:4747", "127.0.0.1", "anything")] == [
        True,
        True,
        True,
        False,
    ]


def test_the_address_that_others_are_told_is_always_allowed() -> None:
    assert AllowedHosts.of("127.0.0.1", "tunnel.example", None).allows("tunnel.example:80")
