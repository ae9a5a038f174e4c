"""`agl prometheus`, `agl agentops`, `agl vllm` and `agl doctor`, each against the real counterpart."""

from __future__ import annotations

import importlib
import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agentlightning.cli import main
from agentlightning.cli.doctor import VARIABLES
from agentlightning.store import SQLiteLightningStore
from tests.cli.terminal import Serve
from tests.stubs.processes import run_program

ROOT = Path(__file__).parents[2]


def fetch(url: str, body: bytes | None = None, **headers: str) -> bytes:
    request = urllib.request.Request(url, body, {name.replace("_", "-"): value for name, value in headers.items()})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return reply.read()


# --- prometheus ------------------------------------------------------------------------------------------------------


def test_what_processes_count_in_one_folder_is_one_page(serve: Serve, tmp_path: Path) -> None:
    shared = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics")}
    server, [line] = serve("prometheus", "--metrics-path", "/metrics/", **shared)
    url = line.split()[-1]
    assert url.endswith("/metrics")
    counting = "import prometheus_client as p; p.Counter('steps', 'x').inc(2)"
    for _ in range(2):
        run_program("python", "-c", counting, **shared)
    assert b"steps_total 4.0" in fetch(url)
    assert fetch(url + "/") == fetch(url)
    assert json.loads(fetch(url.removesuffix("metrics") + "health")) == {"status": "ok"}
    assert server.interrupted() == 0


def test_a_page_beyond_loopback_needs_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    assert main(["prometheus", "--host", "0.0.0.0", "--port", "0"]) == 1
    assert "AGL_TOKEN=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"), [([], "PROMETHEUS_MULTIPROC_DIR is not set"), (["--metrics-path", "/"], "must begin with")]
)
def test_a_wrong_setting_of_the_page_is_one_line(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    assert main(["prometheus", *arguments]) == 2
    assert text in capsys.readouterr().err


# --- agentops --------------------------------------------------------------------------------------------------------


def trace(*spans: tuple[bytes, bytes, str]) -> bytes:
    """Return an OTLP request with spans (id, parent, name) of one trace, as the SDK sends them: without ids of ours."""
    request = ExportTraceServiceRequest()
    scoped = request.resource_spans.add().scope_spans.add()
    for span_id, parent_id, name in spans:
        scoped.spans.add(trace_id=b"t" * 16, span_id=span_id, parent_span_id=parent_id, name=name)
    return request.SerializeToString()


@pytest.mark.parametrize("token", ["", "s3cret"])
async def test_what_the_agentops_sdk_sends_becomes_a_rollout(serve: Serve, tmp_path: Path, token: str) -> None:
    server, lines = serve("agentops", "--store", "agl.db", lines=3, AGL_TOKEN=token)
    variables = dict(line.split("=", 1) for line in lines)
    endpoint = variables["AGENTOPS_API_ENDPOINT"]
    key = token or variables["AGENTOPS_API_KEY"]
    answer = json.loads(fetch(f"{endpoint}/v3/auth/token", json.dumps({"api_key": key}).encode()))
    sender = {"authorization": f"Bearer {answer['token']}", "content_type": "application/x-protobuf"}
    traces = variables["AGENTOPS_EXPORTER_ENDPOINT"]
    fetch(traces, trace((b"child--1", b"root---1", "llm")), **sender)
    fetch(traces, trace((b"child--2", b"root---1", "tool"), (b"root---1", b"", "session")), **sender)
    fetch(f"{endpoint}/v4/logs/upload/", b"said", **sender)
    if token:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            fetch(f"{endpoint}/v3/auth/token", b'{"api_key": "wrong"}')
    else:
        fetch(traces, trace((b"child--3", b"root---2", "of a trace without an end")), **sender)
    assert server.interrupted() == 0
    store = SQLiteLightningStore(tmp_path / "agl.db")
    first, *others = await store.query_rollouts(sort_by="start_time")
    assert (first.status, first.input["trace_id"]) == ("succeeded", (b"t" * 16).hex())
    assert {span.name for span in await store.query_spans(first.rollout_id)} == {"llm", "tool", "session"}
    assert [rollout.status for rollout in others] == ([] if token else ["failed"])
    await store.close()


# --- vllm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "code"), [("0.10.1", 2), ("0.10.2", 7), ("0.11.0+cu129", 7)])
def test_arguments_go_to_vllm_as_they_are(tmp_path: Path, version: str, code: int) -> None:
    package = tmp_path / "vllm/entrypoints/cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text("import sys\ndef main():\n    print(sys.argv)\n    return 7\n")
    (tmp_path / "vllm.dist-info").mkdir()
    (tmp_path / "vllm.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    words = ("vllm", "serve", "m", "--help", "--port", "1")
    done = run_program("agl", *words, code=code, PYTHONPATH=f"{tmp_path}:{ROOT}")
    if code == 7:
        assert done.stdout == "['vllm', 'serve', 'm', '--help', '--port', '1']\n"
    else:
        assert f"vllm {version} does not return token ids" in done.stderr


def test_vllm_that_is_not_installed_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm", "serve"]) == 2
    assert capsys.readouterr().err.startswith("agl: agl vllm requires the package 'vllm'. Install it")
    assert main(["vllm", "serve", "--help"]) == 2  # the options of vLLM are its own


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_the_help_of_vllm_needs_no_vllm(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm", option]) == 0
    assert "agl vllm serve my-org/my-model --port 8000" in capsys.readouterr().out


# --- commands as modules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "command"),
    [("store", "store"), ("vllm", "vllm"), ("prometheus", "prometheus"), ("agentops_server", "agentops")],
)
def test_a_command_is_a_module_of_its_own(module: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module(f"agentlightning.cli.{module}").main(["--help"]) == 0
    assert f"Usage: agl {command}" in capsys.readouterr().out
    run_program("python", "-m", f"agentlightning.cli.{module}", "--no-such-option", code=2)


# --- doctor ----------------------------------------------------------------------------------------------------------


def findings(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = main(["doctor", "--json", *arguments])
    return code, {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_the_doctor_finds_nothing_wrong_where_nothing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, all_findings = findings(capsys)
    assert (code, {finding["state"] for finding in all_findings.values()} - {"ok", "absent"}) == (0, set())
    assert all_findings["folder"]["state"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_names_what_is_wrong_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGL_TOKN", "x")
    monkeypatch.setenv("AGL_TOKEN", "s3cret")
    code, all_findings = findings(capsys, "--store", "http://u:hidden@127.0.0.1:1?deadline=0.1")
    assert code == 1
    assert all_findings["AGL_TOKN"]["state"] == "wrong"
    assert all_findings["AGL_TOKN"]["found"].endswith("did you mean AGL_TOKEN?")
    [store] = [finding for what, finding in all_findings.items() if what.startswith("store ")]
    assert store["state"] == "wrong"
    assert not re.search("s3cret|hidden", json.dumps(all_findings))


def test_the_doctor_knows_every_variable_that_the_package_reads() -> None:
    sources = [path.read_text() for path in (ROOT / "agentlightning").rglob("*.py") if path.name != "semconv.py"]
    named = {name for source in sources for name in re.findall(r'"((?:AGL|AGENT_LIGHTNING)_[A-Z_]*[A-Z])"', source)}
    assert named - VARIABLES - {"AGL_ANNOTATION"} == set()
