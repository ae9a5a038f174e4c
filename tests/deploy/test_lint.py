"""Image and job script by the rules of their linters; a linter or Docker daemon that is there has its say too."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess

import pytest

from tests.deploy.recipes import COMPOSE, DOCKERFILE, ROOT, SBATCH

IGNORED = DOCKERFILE.with_name("Dockerfile.dockerignore")


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile: name and arguments, comments left out and lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def all_of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def test_base_images_have_a_version() -> None:
    """hadolint DL3006, DL3007."""
    images = [image.split()[0] for image in all_of("FROM")]
    assert images == ["python:${PYTHON_VERSION}-slim"] * 2
    assert re.fullmatch(r"PYTHON_VERSION=3\.\d+", all_of("ARG")[0])


def test_files_are_copied_not_added_and_all_of_them_exist_and_are_let_in() -> None:
    """hadolint DL3020; what `.dockerignore` keeps out cannot be copied."""
    assert not all_of("ADD")
    let_in = [line[1:] for line in IGNORED.read_text().splitlines() if line.startswith("!")]
    sources = [word for copy in all_of("COPY") for word in copy.split()[:-1]]
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in let_in), source


def test_the_image_runs_as_nobody_in_particular() -> None:
    """hadolint DL3002; a number, so that Kubernetes can see that it is not root."""
    assert all_of("USER") == ["10001:10001"]


def test_programs_are_started_without_a_shell_that_would_keep_their_signals() -> None:
    """hadolint DL3025."""
    assert all(each.startswith("[") for each in (*all_of("ENTRYPOINT"), *all_of("CMD")))
    assert all_of("ENTRYPOINT") == ['["agl"]']


def test_packages_are_pinned_and_leave_no_cache() -> None:
    """hadolint DL3013, DL3042."""
    pip = [command for run in all_of("RUN") for command in re.findall(r"pip \w+[^&]*", run)]
    assert len(pip) == 2
    assert all("--no-cache-dir" in command for command in pip)
    assert "-c constraints.txt" in pip[0]
    assert "--no-index" in pip[1], "what was built is what is installed"


def test_no_variable_of_the_image_holds_a_secret() -> None:
    for given in (*all_of("ENV"), *all_of("ARG")):
        assert not re.search("TOKEN|KEY|SECRET|PASSWORD", given)


def test_the_job_script_is_bash_that_parses_and_stops_at_an_error() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    assert "set -euo pipefail" in SBATCH.read_text()


def test_settings_of_the_job_stand_before_its_first_command() -> None:
    """Slurm reads no further than that."""
    body = SBATCH.read_text().split("\nset -euo", 1)
    assert body[0].count("#SBATCH") == len(re.findall("^#SBATCH --", SBATCH.read_text(), re.MULTILINE)) >= 5


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="shellcheck is not installed: apt-get install shellcheck"
)
def test_shellcheck_finds_nothing_in_the_job_script() -> None:
    done = subprocess.run(["shellcheck", str(SBATCH)], capture_output=True, text=True, check=False)
    assert done.stdout == ""


def has_docker() -> bool:
    """True where a daemon answers, and may fetch the base image."""
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_image_is_built_and_shows_its_version() -> None:
    if not has_docker():
        pytest.skip("no Docker daemon answers; the rules above are what is checked here")
    build = ["docker", "build", "-q", "-f", str(DOCKERFILE), str(ROOT)]
    image = subprocess.run(build, capture_output=True, text=True, check=True).stdout.strip()
    shown = subprocess.run(["docker", "run", "--rm", "--read-only", image, "--version"], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        environment = {"AGL_TOKEN": "t", "UPSTREAM_URL": "http://127.0.0.1:1/v1", "MODEL": "m"}
        config = ["env", *[f"{name}={value}" for name, value in environment.items()], "docker", "compose"]
        subprocess.run([*config, "-f", str(COMPOSE), "config", "--quiet"], check=True)
