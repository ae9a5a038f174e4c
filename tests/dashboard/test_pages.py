"""The files of the page as a browser asks for them: what is open, what its headers forbid, and that nothing else of the
machine can be read."""

from __future__ import annotations

import gzip
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentlightning.dashboard import pages
from agentlightning.store.client_server import LightningStoreServer
from agentlightning.store.http import mounts
from tests.stubs.raw_http import Answer, exchange, request
from tests.stubs.running import serving

TOKEN = "the-token-of-this-server"
SCRIPT = b"console.log('a script of the page');\n" * 100
DOCUMENT = '<script type="module" nonce="__CSP_NONCE__" src="./assets/index-1.js"></script>'


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the one that the build makes, with a secret beside it."""
    folder = tmp_path / "static"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text(DOCUMENT)
    (folder / "assets" / "index-1.js").write_bytes(SCRIPT)
    (tmp_path / "secret.txt").write_text("a secret of this machine")
    monkeypatch.setattr(pages.Pages.__init__, "__defaults__", (folder,))
    return folder


@pytest.fixture
async def server(built: Path) -> AsyncIterator[LightningStoreServer]:
    async with serving(token=TOKEN) as server:
        yield server


async def get(server: LightningStoreServer, path: str, method: str = "GET", **headers: str) -> Answer:
    return await exchange(server.server_launcher.port, request(method, path, **headers), to_head=method == "HEAD")


async def test_the_page_is_open_and_lets_in_only_what_carries_its_nonce(server: LightningStoreServer) -> None:
    answers = [await get(server, "/") for _ in range(2)]
    nonces: set[str] = set()
    for answer in answers:
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/html")
        policy = answer.headers["content-security-policy"]
        [nonce] = set(re.findall(r"'nonce-([\w-]+)'", policy))
        assert f'nonce="{nonce}"'.encode() in answer.body
        assert b"__CSP_NONCE__" not in answer.body
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
        assert answer.headers["cache-control"] == "no-store"
        nonces.add(nonce)
    assert len(nonces) == 2, "a nonce is used once"


async def test_a_file_is_kept_for_good_and_packed_for_who_takes_it(server: LightningStoreServer) -> None:
    plain = await get(server, "/assets/index-1.js", accept_encoding="br, gzip;q=0")
    assert (plain.status, plain.body) == (200, SCRIPT)
    assert "immutable" in plain.headers["cache-control"]
    assert plain.headers["content-type"].startswith("text/javascript")
    assert plain.headers["x-content-type-options"] == "nosniff"
    packed = await get(server, "/assets/index-1.js", accept_encoding="gzip, br")
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == SCRIPT
    again = await get(server, "/assets/index-1.js", if_none_match=plain.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    head = await get(server, "/assets/index-1.js", "HEAD", accept_encoding="identity")
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(SCRIPT)))


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../index.html",
        "/assets/../../secret.txt",
        "/assets/%2e%2e/%2e%2e/secret.txt",
        "/assets/..%2f..%2fsecret.txt",
        "/assets/%2fetc%2fpasswd",
        "/assets/index-1.js/..",
        "/assets//index-1.js",
        "/assets/index-1.js%00",
        "/assets/",
        "/assets",
        "/index.html",
        "/secret.txt",
        "/static/index.html",
    ],
)
async def test_no_other_file_can_be_read(server: LightningStoreServer, path: str) -> None:
    answer = await get(server, path)
    assert answer.status in (401, 404)
    assert b"secret of this machine" not in answer.body


async def test_data_need_the_token_all_the_same(server: LightningStoreServer) -> None:
    for path in ("/v1/agl/rollouts", "/v1/agl/runs", "/v1/prometheus", "/openapi.json"):
        assert (await get(server, path)).status == 401
        assert (await get(server, path, authorization=f"Bearer {TOKEN}")).status == 200


async def test_a_page_under_a_foreign_name_is_refused(server: LightningStoreServer) -> None:
    assert (await get(server, "/", host="rebound.example")).status == 403


async def test_a_server_whose_page_is_not_built_says_what_to_do(built: Path) -> None:
    (built / "index.html").unlink()
    async with serving() as server:
        answer = await get(server, "/")
        assert answer.status == 404
        assert b"make dashboard" in answer.body
        assert (await get(server, "/v1/agl/rollouts")).status == 200


async def test_a_part_that_cannot_be_imported_does_not_keep_the_store_from_being_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mounts, "MOUNTS", ("agentlightning.no_such_part:mount",))
    monkeypatch.setattr(mounts.mounts_of, "__defaults__", (mounts.MOUNTS,))
    async with serving() as server:
        assert (await get(server, "/v1/agl/rollouts")).status == 200
        assert (await get(server, "/")).status == 404
    assert "agentlightning.no_such_part:mount" in caplog.text
