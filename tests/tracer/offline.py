"""Runs a program in a process of its own that fails at the first attempt to leave this machine."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.stubs.processes import run_program

ROOT = Path(__file__).parents[2]
_GUARD = """
import json, socket, sys
left = []
here = ("127.0.0.1", "::1", "localhost", None)
connect, look_up = socket.socket.connect, socket.getaddrinfo
def connect_here(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in here:
        left.append(str(address))
        raise OSError(f"no network: {address}")
    return connect(self, address)
def look_up_here(host, *args, **kwargs):
    if host not in here:
        left.append(str(host))
        raise OSError(f"no network: {host}")
    return look_up(host, *args, **kwargs)
socket.socket.connect, socket.getaddrinfo = connect_here, look_up_here
import atexit
atexit.register(lambda: print("LEFT", json.dumps(left)))  # registered first, so run last
"""


def run_offline(program: str, **variables: str) -> dict[str, Any]:
    """Run a program that prints JSON as its last line, and return that; asserts that nothing left the machine."""
    keys = ("AGENTOPS_API_KEY", "WANDB_API_KEY", "WANDB_ERROR_REPORTING")
    environment = {key: value for key, value in os.environ.items() if key not in keys}
    with tempfile.TemporaryDirectory() as folder:  # vendors write log files where they run
        whole = {**environment, "PYTHONPATH": str(ROOT), **variables}
        done = run_program("python", "-c", _GUARD + program, folder=Path(folder), environment=whole)
    *_, answer, leftovers = done.stdout.strip().splitlines()
    assert leftovers == "LEFT []"
    return json.loads(answer)
