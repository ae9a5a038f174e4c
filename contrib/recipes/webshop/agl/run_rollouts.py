"""Run the agent on this machine for a run of `train.py`, with the roles in separate processes.

The agent is the Node program in the parent folder. The value of its purchase is computed here, in Python.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from shop import Task, catalogue, value

import agentlightning as agl
from agentlightning.execution import exit_code_of

PROGRAM = Path(__file__).parents[1] / "dist/agent.cjs"


def worth(output: agl.ProgramOutput, task: Task) -> float:
    """Return the share of the wish that the purchase meets; the program's last line is the purchase."""
    if output.exit_code != 0:
        raise RuntimeError(f"the agent ended with exit code {output.exit_code}: {output.stderr[-500:]}")
    bought = json.loads(output.stdout.splitlines()[-1])
    return 0.0 if bought is None else value(task, catalogue().get(bought["id"]), bought["size"])


def customer(shop: str) -> agl.CommandAgent:
    """Return the agent that buys in the shop at this address; `worth` is its reward."""
    return agl.CommandAgent(["node", str(PROGRAM)], env={"SHOP_URL": shop}, reward="reward_fn", timeout_seconds=60)


def parser_of_role() -> argparse.ArgumentParser:
    """Return a parser with the option that both programs have."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--external-store-address",
        metavar="URL",
        help="store server (agl store) of the run; or set AGL_MANAGED_STORE=0 and AGENT_LIGHTNING_STORE_URL",
    )
    return parser


def check_program(parser: argparse.ArgumentParser) -> None:
    """End with a message if the agent cannot be run on this machine."""
    if shutil.which("node") is None:
        parser.error("the agent is a Node program, but node (20 or newer) is not on the PATH: install it")
    if not PROGRAM.exists():
        parser.error(f"{PROGRAM} is not built: run `npm ci && npm run build` in {PROGRAM.parents[1]}")


def run(main: Callable[[], None]) -> None:
    """Run a program; exit with the codes of `agl runner`: 69 and 77 for store errors, 130 for Ctrl+C."""
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        if (code := exit_code_of(error)) == 1:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(code)


def main() -> None:
    parser = parser_of_role()
    parser.add_argument("--runners", type=int, default=1, help="number of runner processes")
    options = parser.parse_args()
    check_program(parser)
    shop = os.environ.get("SHOP_URL")
    if not shop:
        parser.error("SHOP_URL must be the address of the shop: start it with `python shop.py`")
    agl.setup_logging(color=False)
    trainer = agl.Trainer(
        strategy={"type": "cs", "role": "runner", "managed_store": False},
        store=options.external_store_address,
        n_runners=options.runners,
        runner={"concurrency": 8},
        reward_fn=worth,
    )
    trainer.fit(customer(shop))


if __name__ == "__main__":
    run(main)
