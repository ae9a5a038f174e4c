"""The image and the compose file, run with podman: each service with the command and settings that the file declares.

The tests skip without podman, or if podman cannot run the base image. `PODMAN_BUILD_OPTIONS` holds further options of
`podman build`, for example `--volume /etc/pip.conf:/etc/pip.conf:ro` on a machine with its own package index.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.deploy.recipes import DOCKERFILE, ROOT, VALUES, Part, compose, compose_parts

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

PROJECT = f"agl-test-{os.getpid()}"
BASE = "docker.io/library/python:3.11-slim"
MODEL_SERVER = """
import http.server, json, re
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        total = sum(int(number) for number in re.findall("[0-9]+", request["messages"][-1]["content"]))
        message = {"role": "assistant", "content": str(total)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        reply = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())
http.server.ThreadingHTTPServer(("0.0.0.0", 8001), Handler).serve_forever()
"""


def podman(*words: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a podman command and return it with its output, errors included."""
    done = subprocess.run(["podman", *words], stdout=-1, stderr=-2, text=True, timeout=timeout, check=False)
    assert done.returncode == 0 or not check, f"podman {shlex.join(words)}: {done.stdout}"
    return done


def start(part: Part, replica: int = 1) -> str:
    """Start a service of the compose file and return the name of its container."""
    service, name = compose()["services"].get(part.name, {}), f"{PROJECT}-{part.name}-{replica}"
    options = ["--read-only", "--cap-drop", "ALL", "--init", "--network", PROJECT, "--network-alias", part.name]
    options += [word for path in service.get("tmpfs", []) for word in ("--tmpfs", path)]
    options += [word for option in service.get("security_opt", []) for word in ("--security-opt", option)]
    options += [word for volume in service.get("volumes", []) for word in ("--volume", f"{PROJECT}-{volume}")]
    options += [word for item in part.environment.items() for word in ("--env", "=".join(item))]
    podman("run", "--detach", "--name", name, *options, "--entrypoint", part.command[0], PROJECT, *part.command[1:])
    return name


def until_healthy(name: str, part: str, seconds: float = 60) -> None:
    """Run the health check of the compose file until it succeeds."""
    check, end = compose()["services"][part]["healthcheck"]["test"][1:], time.monotonic() + seconds
    while podman("exec", name, *check, check=False).returncode != 0:
        running = podman("inspect", "--format", "{{.State.Running}}", name).stdout.strip()
        assert (running, time.monotonic() < end) == ("true", True), podman("logs", name).stdout
        time.sleep(0.2)


def stopped(name: str) -> int:
    """Send SIGTERM to a container and return its exit status; podman kills it after 20 seconds."""
    podman("stop", "--time", "20", name)
    return int(podman("inspect", "--format", "{{.State.ExitCode}}", name).stdout)


@pytest.fixture
def network() -> Iterator[None]:
    """Build the image and make a network; remove both, and all containers and volumes, at the end."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    base = podman("run", "--rm", BASE, "python", "--version", check=False, timeout=300)
    if base.returncode != 0:
        pytest.skip(f"podman cannot run {BASE}: {base.stdout[-300:]}")
    further = ["--layers=false", "--force-rm", *shlex.split(os.environ.get("PODMAN_BUILD_OPTIONS", ""))]
    try:
        podman("build", *further, "-f", str(DOCKERFILE), "-t", PROJECT, str(ROOT), timeout=600)
        podman("network", "create", PROJECT)
        yield
    finally:
        containers = podman("ps", "--all", "--quiet", "--filter", f"name={PROJECT}").stdout.split()
        for name in containers:
            podman("rm", "--force", "--volumes", name, check=False)
        podman("volume", "rm", "--force", f"{PROJECT}-data", check=False)
        podman("network", "rm", "--force", PROJECT, check=False)
        podman("rmi", "--force", PROJECT, check=False)


@pytest.mark.usefixtures("network")
def test_the_services_run_every_task_and_the_volume_keeps_the_rollouts() -> None:
    values = {**VALUES, "UPSTREAM_URL": "http://model:8001/v1"}
    parts = {part.name: part for part in compose_parts(values)}
    start(Part("model", ["python", "-c", MODEL_SERVER], {}))
    store = start(parts["store"])
    until_healthy(store, "store")
    assert podman("exec", store, "id", "-u").stdout.strip() == "10001"
    assert "Read-only" in podman("exec", store, "touch", "/app/file", check=False).stdout
    gateway = start(parts["gateway"])
    until_healthy(gateway, "gateway")
    assert podman("inspect", "--format", "{{range .Mounts}}{{.Type}} {{end}}", gateway).stdout.strip() == ""
    runners, algorithm = [start(parts["runner"], replica) for replica in (1, 2)], start(parts["algorithm"])
    codes = [podman("wait", name, timeout=120).stdout.strip() for name in (algorithm, *runners)]
    said = podman("logs", algorithm).stdout
    assert codes == ["0"] * 3, said + podman("logs", runners[0]).stdout
    assert "16 rollouts (16 scored), mean reward 1.000" in said
    assert (stopped(gateway), stopped(store)) == (0, 0)

    podman("start", store)
    until_healthy(store, "store")
    shown = podman("exec", store, "agl", "rollouts", "list", "--store", "http://127.0.0.1:4747").stdout
    assert shown.count("succeeded scored") == 16, shown
