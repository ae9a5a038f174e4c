"""One trial in bubblewrap without the gateway: its Dockerfile, its steps, and the network of its verifier."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentlightning.environments.harbor import trial_folder
from agentlightning.environments.harbor.agent import HarborAgent, HarborFault
from agentlightning.types import LLM
from tests.environments.harbor_agent.tasks import SOLUTION, TEST, make_task


def rewards(text: str, task: Path, model: LLM | None = None, **settings: Any) -> Mapping[str, float]:
    """Run a script as the agent of a task, and return its verdict."""
    fields = {"import_path": "tests.environments.harbor_agent.agents:Script", "kwargs": {"script": text}}
    agent = HarborAgent(fields, **settings)
    with trial_folder.trial_folder("at-1") as folder:
        return agent.verdict(asyncio.run(agent.run_trial(str(task), model, folder)))


# --- the Dockerfile --------------------------------------------------------------------------------------------------

DOCKERFILE = """ARG OUTER=1
FROM ubuntu:24.04
SHELL ["/bin/bash", "-e", "-o", "pipefail", "-c"]
ARG BUILT=yes
ENV PATH=/opt/tools:$PATH

WORKDIR /app
COPY calc.py /app
COPY ["calc.py", "/srv/two words/"]
COPY --chown=1:1 tools/ \\
  # the tools

  /opt/tools
RUN ["bash", "-c", "[ $BUILT = yes ] && [ -z $OUTER ] && echo $0 > exec", "json form"]
RUN false | true || echo "pipefail in $(pwd)" > shell
"""
FOLLOWED = """set -e
[ -f "/srv/two words/calc.py" ]
[ -f /app/calc.py ] && [ "$(cat exec)" = "json form" ] && [ "$(cat shell)" = "pipefail in /app" ] && [ -z "$BUILT" ]
[ "$(bash /opt/tools/tool)" = works ] && chmod +x /opt/tools/tool && tool
"""


def test_a_dockerfile_is_followed_as_docker_does(tmp_path: Path) -> None:
    changed = {"environment/Dockerfile": DOCKERFILE, "environment/tools/tool": "#!/bin/sh\necho works\n"}
    assert rewards(FOLLOWED + SOLUTION, make_task(tmp_path, changed)) == {"reward": 1.0}


@pytest.mark.parametrize("line", ["COPY calc.py /usr/x.py", "RUN false", "WORKDIR /usr/x"])
def test_an_instruction_that_fails_is_named(line: str, tmp_path: Path) -> None:
    task = make_task(tmp_path, {"environment/Dockerfile": f"FROM x\n\n{line}\n"})
    with pytest.raises(HarborFault, match=f"the Dockerfile at line 3, '{line}': .*or change {tmp_path}") as fault:
        rewards("true", task)
    assert "SandboxBuildFailedError" in str(fault.value)


# --- several steps ---------------------------------------------------------------------------------------------------

STEPS = """version = "1.0"
[environment]
[[steps]]
name = "one"
[[steps]]
name = "two"
"""


def two_steps(folder: Path, toml: str = STEPS, test: str = TEST) -> Path:
    files: dict[str, str | None] = {"task.toml": toml}
    for name in ("one", "two"):
        files |= {f"steps/{name}/instruction.md": "Mend it.\n", f"steps/{name}/tests/test.sh": test}
    return make_task(folder, {**files, "instruction.md": None, "tests/test.sh": None, "solution/solve.sh": None})


SECOND = "if [ -e /srv/second ]; then {}; fi; touch /srv/second\n"


def test_each_step_is_judged_by_what_was_copied(tmp_path: Path) -> None:
    assert rewards(SOLUTION, two_steps(tmp_path / "a")) == {"reward": 1.0}
    solved_later = SECOND.format("printf 'def mul(a, b):\\n    return a * b\\n' > /app/calc.py")
    assert rewards(solved_later, two_steps(tmp_path / "b")) == {"reward": 0.5}


@pytest.mark.parametrize("policy_errors", [[], ["RuntimeError"]])
def test_a_step_whose_work_cannot_be_copied_is_a_fault(policy_errors: list[str], tmp_path: Path) -> None:
    removed = SOLUTION + SECOND.format("rm -rf /app" + ("; exit 3" if policy_errors else ""))
    with pytest.raises(HarborFault, match="did not get /app"):
        rewards(removed, two_steps(tmp_path), policy_errors=policy_errors)


def test_no_step_is_judged_in_the_sandbox_of_the_agent(tmp_path: Path) -> None:
    shared = STEPS + '[steps.verifier]\nenvironment_mode = "shared"\n'
    mixed = shared.replace("[environment]", '[verifier]\nenvironment_mode = "separate"\n[environment]')
    test = "#!/bin/bash\nif [ -e /srv/marker ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    tasks = [two_steps(tmp_path / str(number), toml, test) for number, toml in enumerate((STEPS, shared, mixed))]
    for task in tasks:
        assert rewards("touch /srv/marker", task) == {"reward": 0.0}
    assert rewards("touch /srv/marker", tasks[-1], verifier="task") == {"reward": 0.5}  # so the above can fail


# --- the network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [8, 45, 50, 60])
def test_a_verifier_cannot_reach_the_model_however_long_the_name_of_its_trial(length: int, tmp_path: Path) -> None:
    """Harbor cuts the name of the sandbox of the verifier."""
    with socket.create_server(("127.0.0.1", 0)) as model:
        port = model.getsockname()[1]
        connects = f"""python3 -c "import socket; socket.create_connection(('127.0.0.1', {port}), 5)" """
        test = f"#!/bin/bash\nif {connects}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
        task = make_task(tmp_path, {"tests/test.sh": test})
        endpoint = LLM(endpoint=f"http://127.0.0.1:{port}/v1", model="m")
        assert rewards(connects, task, endpoint, trial={"trial_name": "t" * length}) == {"reward": 0.0}
