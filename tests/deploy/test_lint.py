"""Images and scripts by the rules of their linters; a linter or Docker daemon that is there has its say too."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.deploy.recipes import CLUSTER, COMPOSE, DOCKERFILE, ROOT, SBATCH

RECIPE = ROOT / "contrib/recipes/webshop"
IMAGES = {DOCKERFILE: ROOT, RECIPE / "Dockerfile": RECIPE}
"""Each Dockerfile, and the folder that it is built in."""
JOBS = (SBATCH, CLUSTER / "job.sbatch")
SCRIPTS = (*JOBS, ROOT / "scripts/install_test_programs.sh", RECIPE / "scripts/run_stack.sh", RECIPE / "agl/setup.sh")

each_image = pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.parent.name)
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)


def instructions(image: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile: name and arguments, comments left out and lines joined."""
    lines = [line for line in image.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def all_of(name: str, image: Path = DOCKERFILE) -> list[str]:
    return [rest for instruction, rest in instructions(image) if instruction == name]


def sources(image: Path) -> list[str]:
    """Return the files that are copied from the folder in which the image is built."""
    copies = [copy for copy in all_of("COPY", image) if not copy.startswith("--from=")]
    return [word for copy in copies for word in copy.split()[:-1]]


@each_image
def test_base_images_have_a_version(image: Path) -> None:
    """hadolint DL3006, DL3007."""
    defaults = dict(argument.split("=") for argument in all_of("ARG", image))
    for words in all_of("FROM", image):
        base = re.sub(r"\$\{(\w+)\}", lambda name: defaults[name[1]], words.split()[0])
        assert re.fullmatch(r"(python:3\.\d+|node:\d+)-slim|agentlightning:\d+\.\d+\.\d+-webshop", base)


@each_image
def test_files_are_copied_not_added_and_all_of_them_exist_and_are_let_in(image: Path) -> None:
    """hadolint DL3020; what `.dockerignore` keeps out cannot be copied."""
    folder = IMAGES[image]
    assert not all_of("ADD", image)
    ignored = image.with_name("Dockerfile.dockerignore")
    ignored = ignored if ignored.exists() else folder / ".dockerignore"
    let_in = [line[1:] for line in ignored.read_text().splitlines() if line.startswith("!")]
    assert sources(image)
    for source in sources(image):
        assert (folder / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in let_in), source


def test_what_the_wheel_is_built_of_is_copied() -> None:
    """A file that `pyproject.toml` names and the build does not find is an error there."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [settings["project"]["readme"], *settings["project"]["license-files"], *wheel["sbom-files"]]
    for name in (*needed, *wheel["packages"]):
        assert any(Path(name).is_relative_to(source) for source in sources(DOCKERFILE)), name


@each_image
def test_the_image_runs_as_nobody_in_particular(image: Path) -> None:
    """hadolint DL3002; a number, so that Kubernetes can see that it is not root."""
    assert all_of("USER", image) == ["10001:10001"]


@each_image
def test_programs_are_started_without_a_shell_that_would_keep_their_signals(image: Path) -> None:
    """hadolint DL3025."""
    assert all(each.startswith("[") for each in (*all_of("ENTRYPOINT", image), *all_of("CMD", image)))
    assert all_of("ENTRYPOINT") == ['["agl"]']


def test_packages_are_pinned_and_leave_no_cache() -> None:
    """hadolint DL3013, DL3042."""
    pip = [command for run in all_of("RUN") for command in re.findall(r"pip \w+[^&]*", run)]
    assert len(pip) == 2
    assert all("--no-cache-dir" in command for command in pip)
    assert "-c constraints.txt" in pip[0]
    assert "--no-index" in pip[1], "what was built is what is installed"


@each_image
def test_no_variable_of_the_image_holds_a_secret(image: Path) -> None:
    for instruction in (*all_of("ENV", image), *all_of("ARG", image)):
        assert not re.search("TOKEN|KEY|SECRET|PASSWORD", instruction)


@each_script
def test_a_script_is_bash_that_parses_and_stops_at_an_error(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.name)
def test_settings_of_the_job_stand_before_its_first_command(job: Path) -> None:
    """Slurm reads no further than that."""
    body = job.read_text().split("\nset -euo", 1)
    assert body[0].count("#SBATCH --") == len(re.findall("^#SBATCH --", job.read_text(), re.MULTILINE)) >= 5


@each_script
@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="shellcheck is not installed: apt-get install shellcheck"
)
def test_shellcheck_finds_nothing(script: Path) -> None:
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False)
    assert done.stdout == ""


def has_docker() -> bool:
    """True where a daemon answers, and may fetch the base image."""
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_images_are_built_and_their_programs_start() -> None:
    if not has_docker():
        pytest.skip("no Docker daemon answers; the rules above are what is checked here")
    build = ["docker", "build", "-q", "-f", str(DOCKERFILE), str(ROOT)]
    image = subprocess.run(build, capture_output=True, text=True, check=True).stdout.strip()
    shown = subprocess.run(["docker", "run", "--rm", "--read-only", image, "--version"], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    build = ["docker", "build", "-q", "--build-arg", f"BASE={image}", str(RECIPE)]
    recipe = subprocess.run(build, capture_output=True, text=True, check=True).stdout.strip()
    for command in (["node", "--version"], ["python", "agl/run_rollouts.py", "--help"]):
        subprocess.run(["docker", "run", "--rm", "--read-only", recipe, *command], check=True)
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        environment = {"AGL_TOKEN": "t", "UPSTREAM_URL": "http://127.0.0.1:1/v1", "MODEL": "m"}
        config = ["env", *[f"{name}={value}" for name, value in environment.items()], "docker", "compose"]
        subprocess.run([*config, "-f", str(COMPOSE), "config", "--quiet"], check=True)
