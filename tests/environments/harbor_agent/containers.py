"""A container image of this machine's own programs, so that tests need neither a registry nor a network."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

IMAGE = f"localhost/agl-harbor-test:{os.getpid()}"
_PROGRAMS = (
    "bash cat chmod chown cp date env find grep head kill ls mkdir mktemp mv python3 rm sed sleep sort tail tar tee "
    "touch tr true wc"
)
_LIBRARIES = r"dl|gcc_s|m|pthread|rt|stdc\+\+|util"
"""Of compiled Python packages."""
_PYTHON = """
import json, sys, sysconfig
found = sysconfig.get_paths()
print(json.dumps([sys.executable, found["stdlib"], sysconfig.get_config_var("DESTSHARED")]))
"""
_SETTINGS = """[containers]
default_ulimits = []
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
"""What podman needs inside a container or a virtual machine without systemd."""


def podman(*words: str, check: bool = True, stdin: bytes | None = None) -> str:
    """Run a podman command and return its output, errors included."""
    done = subprocess.run(["podman", *words], input=stdin, stdout=-1, stderr=-2, timeout=120, check=False)
    text = done.stdout.decode(errors="replace")
    assert done.returncode == 0 or not check, f"podman {' '.join(words)}: {text}"
    return text


def why_not(folder: Path) -> str | None:
    """Set the variables for podman, make the image, and return why containers cannot run here; None if they can."""
    if shutil.which("podman") is None:
        return "podman is not installed"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if shutil.which("podman-compose") is None:
        return "podman-compose is not installed"
    if "CONTAINERS_CONF" not in os.environ:
        settings = folder / "containers.conf"
        settings.write_text(_SETTINGS)
        os.environ["CONTAINERS_CONF"] = str(settings)
    try:
        podman("import", "--change", "STOPSIGNAL SIGKILL", "-", IMAGE, stdin=_system())
        podman("run", "--rm", IMAGE, "python3", "-c", "import json, ssl, urllib.request")
    except (AssertionError, subprocess.SubprocessError) as error:
        return f"podman cannot run a container here: {str(error)[-300:]}"
    return None


def _system() -> bytes:
    """Return a root file system as a tar: the programs, Python, and the libraries of both."""
    python = subprocess.run(["/usr/bin/python3", "-c", _PYTHON], capture_output=True, text=True, check=True)
    executable, stdlib, extensions = json.loads(python.stdout)
    programs = [shutil.which(word, path="/usr/bin:/bin") for word in _PROGRAMS.split()]
    files = {Path(found) for found in (executable, os.path.realpath(executable), *programs) if found is not None}
    shared = [*files, *Path(extensions).glob("*.so")]
    needed = subprocess.run(["ldd", *shared], stdout=-1, stderr=-3, text=True, check=False)
    files |= {Path(found) for found in re.findall(r"(/\S+) \(0x", needed.stdout)}
    known = subprocess.run(["/sbin/ldconfig", "-p"], stdout=-1, text=True, check=True)
    files |= {Path(found) for found in re.findall(rf" => (/\S*-linux-gnu/lib(?:{_LIBRARIES})\.so\.\d)\n", known.stdout)}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in ("app", "proc", "sys", "dev", "tmp", "root", "etc", "usr/bin", "usr/lib", "usr/lib64"):
            _add(tar, name, tarfile.DIRTYPE)
        for name in ("bin", "lib", "lib64"):
            _add(tar, name, tarfile.SYMTYPE, f"usr/{name}")
        _add(tar, "usr/bin/sh", tarfile.SYMTYPE, "bash")
        for name, text in {"passwd": "root:x:0:0:root:/root:/bin/bash\n", "group": "root:x:0:\n"}.items():
            entry = tarfile.TarInfo(f"etc/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
        for path in sorted(files):
            name = re.sub("^/(bin|lib|lib64)/", r"/usr/\1/", str(path))
            tar.add(path.resolve(), name)
        tar.add(stdlib, stdlib, filter=lambda each: None if re.search("/(test|__pycache__)$", each.name) else each)
    return packed.getvalue()


def _add(tar: tarfile.TarFile, name: str, kind: bytes, target: str = "") -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.mode = kind, target, 0o755
    tar.addfile(entry)
