"""Train with VERL from a command line: `python -m agentlightning.verl key=value ...`.

The keys are those of VERL's configuration. Tasks come from files, the agent from a module:

    python -m agentlightning.verl agentlightning.agent=my_agent.py:agent data.train_files=train.jsonl \\
        actor_rollout_ref.model.path=Qwen2.5-1.5B-Instruct actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8

`agentlightning.n_runners` (1) is the number of runners on this machine. Without `agentlightning.agent`, the store
listens on `agentlightning.port` (4747) and waits for runners elsewhere: `agl runner AGENT --store
http://this-machine:4747`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, cast

from agentlightning.cli.output import log_to_stderr, say
from agentlightning.cli.plan import in_foreground, load_dataset, load_target
from agentlightning.errors import AgentLightningError, BadRequestError

_PORT: Final = 4747
OURS: Final = ("agent", "n_runners", "port")


def main(arguments: Sequence[str]) -> int:
    """Train, and return the exit code: 0; 2 for wrong arguments; otherwise that of `agl run`."""
    if not arguments or {"-h", "--help"} & set(arguments):
        say(__doc__ or "", lines=True)
        return 0 if arguments else 2
    log_to_stderr("INFO", json_lines=False)
    try:
        work = _prepared(arguments)
    except (AgentLightningError, ImportError, TypeError) as error:
        say(f"python -m agentlightning.verl: {error}", to_stderr=True)
        return 2
    return in_foreground(work)


def _prepared(arguments: Sequence[str]) -> Any:
    """Read and check the arguments; return the function that trains."""
    settings, ours = read(arguments)
    from agentlightning.algorithm.verl import VERL
    from agentlightning.trainer import Trainer

    data: dict[str, Any] = settings.get("data", {})
    train = load_dataset("data.train_files", data.pop("train_files", None) or "")
    val_files = data.pop("val_files", None)
    val = None if val_files is None else load_dataset("data.val_files", val_files)
    port, count = _whole(ours, "port", _PORT), _whole(ours, "n_runners", 1)
    agent = None if ours.get("agent") is None else load_target("agentlightning.agent", str(ours["agent"]))
    algorithm = VERL(settings)
    strategy = {"type": "cs", "server_port": port} | ({} if agent is not None else {"role": "algorithm"})

    def work() -> None:
        if agent is None:
            say(f"Start runners on any machine: agl runner AGENT --store http://this-machine:{port}")
        trainer = Trainer(algorithm=algorithm, strategy=strategy, n_runners=count)
        trainer.fit(agent if agent is not None else _nobody, train_dataset=train, val_dataset=val)

    return work


def read(arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return VERL's settings, nested, and the settings of this program.

    Raises:
        ImportError: verl is not installed.
        BadRequestError: an argument is not of the form key=value.
    """
    from agentlightning.training.external.verl.settings import check_version

    wrong = [each for each in arguments if "=" not in each.lstrip("+~")]
    if wrong:
        raise BadRequestError(f"{wrong[0]!r}: expected key=value, such as data.train_batch_size=32")
    check_version()
    from omegaconf import OmegaConf

    listed = OmegaConf.from_dotlist([each.lstrip("+") for each in arguments])
    read = cast("dict[str, Any]", OmegaConf.to_container(listed, resolve=True))
    own: dict[str, Any] = read.get("agentlightning") or {}
    return read, {name: own.pop(name) for name in OURS if name in own}


def _whole(ours: dict[str, Any], name: str, default: int) -> int:
    value = ours.get(name, default)
    if type(value) is not int or value < 1:
        raise BadRequestError(f"agentlightning.{name} must be a whole number of at least 1; got {value!r}")
    return value


def _nobody(task: object) -> float:
    """Replace the agent if no runner is started."""
    raise AssertionError(f"this process has no runner to execute {task!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
