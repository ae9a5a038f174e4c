"""contrib/recipes/webshop: the TypeScript agent, built and run by the real Node, in the real shop; its training; and
all parts as processes, started by its script."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentlightning as agl
from tests.examples.shown import RECIPES, check_learnt, check_untaught, curve, play, run
from tests.frameworks.engine import Json, call, calls, last, said
from tests.stubs.ports import free_port
from tests.stubs.processes import Process, run_program

FOLDER = RECIPES / "webshop"
MODULES = Path(os.environ.get("AGL_TEST_NODE_MODULES", FOLDER / "node_modules"))
WORDS = ("kind", "colour", "material")

needs_node = pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None or not (MODULES / "esbuild").is_dir(),
    reason="node, npm or the packages of package.json are not installed: make test-example NAMES=webshop",
)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER / "agl")
    import shop  # type: ignore[import-not-found]

    return shop


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, its types checked and its agent built by its own `npm run build`."""
    folder = tmp_path_factory.mktemp("recipes") / "webshop"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("node_modules", "dist", "__pycache__"))
    (folder / "node_modules").symlink_to(MODULES)
    run_program("npm", "run", "build", folder=folder)
    return folder


@pytest.fixture
def customer_of(
    built: Path, shop: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Json], Callable[[agl.LLM], float]]:
    """Makes an agent of a task: the customer, run by a Trainer."""
    monkeypatch.syspath_prepend(built / "agl")
    from run_rollouts import customer, worth  # type: ignore[import-not-found]

    def agent_of(task: Json) -> Callable[[agl.LLM], float]:
        def agent(llm: agl.LLM) -> float:
            settings = {"algorithm": "baseline", "strategy": "shm", "reward_fn": worth}
            trainer = agl.Trainer(**settings, initial_resources={"main_llm": llm})
            with shop.serve() as url:
                trainer.fit(customer(url), train_dataset=[task])
            return trainer.result.mean_reward

        return agent

    return agent_of


def buys(task: Json, size: str, **limit: int) -> Callable[[Json], Json]:
    """A model that searches for the wish, looks at the first result and buys it."""

    def model(request: Json) -> Json:
        tool_results = [said(message) for message in request["messages"] if message["role"] == "tool"]
        if not tool_results:
            return call("search", query=" ".join(task[word] for word in WORDS), **limit)
        return call("look", 1, id=tool_results[0].split()[0]) if len(tool_results) == 1 else call("buy", 2, size=size)

    return model


def test_no_combination_is_in_two_parts_and_a_careful_customer_gets_all_of_each_wish(shop: Any) -> None:
    parts = [shop.tasks(part) for part in ("train", "held_out", "shown")]
    combinations = [{tuple(task[word] for word in WORDS) for task in tasks} for tasks in parts]
    assert sum(map(len, combinations)) == len(set.union(*combinations)) == len(shop.catalogue()) / 2
    products = shop.catalogue()
    for task in (one for tasks in parts for one in tasks):
        words = " ".join(task[word] for word in WORDS)
        assert shop.value(task, shop.search(products, words, task["budget"])[0], task["size"]) == 1.0
        assert shop.value(task, shop.search(products, words)[0], task["size"]) < 1.0, "the dear one comes first"


@pytest.mark.parametrize(
    ("change", "worth"),
    [({}, 1.0), ({"colour": "no"}, 0.8), ({"material": "no"}, 0.8), ({"budget": 1}, 0.8), ({"kind": "no"}, 0.0)],
)
def test_a_purchase_is_worth_the_share_of_the_wish_that_it_meets(shop: Any, change: Json, worth: float) -> None:
    bought = next(iter(shop.catalogue().values()))
    wish = {"kind": bought.kind, "colour": bought.colour, "material": bought.material, "budget": bought.price}
    assert shop.value({**wish, "size": "small", **change}, bought, "small") == worth
    assert shop.value({**wish, "size": "small", **change}, bought, "large") == pytest.approx(max(0.0, worth - 0.2))
    assert shop.value({**wish, "size": "small"}, None, "small") == 0.0


@needs_node
def test_what_the_agent_buys_is_scored_and_the_model_sees_what_the_shop_says(customer_of: Any, shop: Any) -> None:
    task = shop.tasks("train")[0]
    reward, requests = play(customer_of(task), buys(task, task["size"], at_most=task["budget"]))
    assert reward == 1.0
    assert [(one["temperature"], one["max_tokens"]) for one in requests] == [(0.5, 24)] * 3, "it samples as it is told"
    assert {tool["function"]["name"] for tool in requests[0]["tools"]} == {"search", "look", "buy"}
    search_result, product_page = (said(last(request)) for request in requests[1:])
    assert shop.page(shop.catalogue()[search_result.split()[0]]) == product_page
    assert play(customer_of(task), buys(task, "another size", at_most=task["budget"]))[0] == 0.0, (
        "the shop does not sell it"
    )
    assert play(customer_of(task), buys(task, task["size"]))[0] == 0.8, "without a limit the dear one is the first"


@needs_node
@pytest.mark.parametrize(
    "mistake",
    [
        "I would like to buy it.",
        call("buy", size="small"),
        call("pay", amount=1),
        calls(("look", {"id": "../orders"}), ("buy", {"size": "small"})),
        call("search", query="", at_most="many"),
    ],
)
def test_a_model_that_makes_mistakes_buys_nothing_and_earns_nothing(customer_of: Any, shop: Any, mistake: Any) -> None:
    reward, requests = play(customer_of(shop.tasks("train")[0]), lambda _: mistake)
    assert reward == 0.0
    assert 1 <= len(requests) <= 5


@needs_node
def test_a_program_that_was_not_built_is_named_with_what_to_do(built: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make test-example NAMES=webshop")
    shutil.copytree(built / "agl", tmp_path / "agl")
    with pytest.raises(AssertionError, match=r"is not built: run `npm ci && npm run build` in"):
        run(f"python {tmp_path / 'agl/train.py'}")


@needs_node
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_runs_whole_and_a_model_that_earns_nothing_learns_nothing(built: Path) -> None:
    printed = run(f"python {built / 'agl/train.py'} --imitation-steps 1 --steps 1 --held-out 4", timeout=250)
    check_untaught(printed)


@needs_node
@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_the_agent_learns_to_heed_the_whole_wish(built: Path) -> None:
    check_learnt(f"python {built / 'agl/train.py'}", 1100, at_most=30, gain=40)


# --- the stack -------------------------------------------------------------------------------------------------------

SMALL = ("--imitation-steps", "1", "--steps", "1", "--held-out", "4")


class Stack(Process):
    """`scripts/run_stack.sh` in a session of its own, as a terminal starts it."""

    def __init__(self, recipe: Path, folder: Path, *options: str, **settings: str) -> None:
        self.folder = folder / "stack"
        self.ports = {name: str(free_port()) for name in ("AGL_SERVER_PORT", "GATEWAY_PORT", "SHOP_PORT")}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        own = {"PATH": path, "PYTHONPATH": str(RECIPES.parents[1]), "STACK_FOLDER": str(self.folder)}
        super().__init__([recipe / "scripts/run_stack.sh", *options], folder, {**own, **self.ports, **settings})
        self.shop = f"http://127.0.0.1:{self.ports['SHOP_PORT']}"

    def part(self, command: str) -> psutil.Process:
        """Return the process of one part, by a word of its command."""
        below = psutil.Process(self.popen.pid).children(recursive=True)
        own = [one for one in below if one.cmdline()[1:] and command in " ".join(one.cmdline()[1:3])]
        return next(one for one in own if (parent := one.parent()) and parent.name() in ("bash", "run_stack.sh"))

    def left(self) -> list[list[str]]:
        """Return the commands of processes that it, or a part of it, has started and that still run."""
        commands: list[list[str]] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SHOP_URL") == self.shop or process.environ().get("STACK_FOLDER") == str(
                    self.folder
                ):
                    commands.append(process.cmdline())
        return commands


@pytest.fixture
def stack(built: Path, tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    pytest.importorskip("torch", reason="torch is not installed: make test-example NAMES=webshop")
    started: list[Stack] = []

    def start(*options: str, **settings: str) -> Stack:
        started.append(Stack(built, tmp_path, *options, **settings))
        return started[-1]

    yield start
    for one in started:
        if one.code is None:
            one.interrupted(signal.SIGTERM)


@needs_node
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_stack_runs_every_part_as_a_process_and_ends_with_the_training(stack: Callable[..., Stack]) -> None:
    one = stack(*SMALL)
    printed = one.succeeded()
    for port in one.ports.values():
        assert f"http://127.0.0.1:{port}" in printed
    assert curve(printed) == {0: 0}
    assert "rollouts 128 done 0 failed" in printed
    logs = {path.stem: path.read_text() for path in one.folder.glob("*.log")}
    assert set(logs) == {"store", "shop", "algorithm", "runner-1", "runner-2"}
    done = [int(number) for text in logs.values() for number in re.findall(r"finished after (\d+) rollouts", text)]
    assert len(done) == 2
    assert sum(done) == 128 + 2 * 2 * 4, "a step, and what is held out before and after it, in two ways"
    assert one.left() == []


def ctrl_c(stack: Stack) -> None:
    os.killpg(stack.popen.pid, signal.SIGINT)


def kill(command: str) -> Callable[[Stack], None]:
    return lambda stack: stack.part(command).kill()


@needs_node
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("end", "code", "pattern"),
    [
        pytest.param(ctrl_c, 130, "", id="ctrl-c", marks=pytest.mark.slow),
        pytest.param(
            kill("run_rollouts.py"), 6, r"runner-\d was ended by SIGKILL", id="runner", marks=pytest.mark.slow
        ),
        pytest.param(kill("agl store"), 3, "store was ended by SIGKILL", id="store", marks=pytest.mark.heavy),
        pytest.param(kill("shop.py"), 4, "shop was ended by SIGKILL", id="shop", marks=pytest.mark.heavy),
        pytest.param(kill("train.py"), 5, "algorithm was ended by SIGKILL", id="algorithm", marks=pytest.mark.heavy),
    ],
)
def test_the_end_of_one_part_is_reported_and_leaves_no_process(
    stack: Callable[..., Stack], end: Callable[[Stack], None], code: int, pattern: str
) -> None:
    one = stack(*SMALL)
    one.until("held-out after 0 updates")
    end(one)
    assert one.ended() == code, one.said
    assert re.search(pattern, one.said)
    assert one.left() == []


@needs_node
@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_the_stack_beyond_loopback_needs_a_token_and_trains(stack: Callable[..., Stack]) -> None:
    one = stack("--steps", "3", "--held-out", "48", AGL_SERVER_HOST="0.0.0.0")
    one.until("logs ")
    token = (one.folder / "token").read_text().strip()
    printed = one.succeeded()
    assert token not in printed
    means = [float(mean) for mean in re.findall(r"^ +\d+ +\d+%.* (\d\.\d+)$", printed, re.MULTILINE)]
    assert len(means) == 4, "before training, and after each step"
    assert means[-1] > means[0] + 0.1


def refused(recipe: Path, folder: Path, **settings: str) -> str:
    """Return the script's message when it refuses to start."""
    one = Stack(recipe, folder, **settings)
    assert one.ended() == 2, one.said
    assert not one.folder.exists()
    return one.said


def test_the_stack_names_what_is_missing_before_it_starts_anything(tmp_path: Path) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()

    def offer(*names: str) -> None:
        for name in names:
            (commands / name).symlink_to(shutil.which(name) or sys.executable)

    offer("bash", "dirname", "env", "readlink")
    for name in ("agl", "python", "node"):
        assert f"there is no {name} on the PATH" in refused(FOLDER, tmp_path, PATH=str(commands))
        offer(name)
    (tmp_path / "scripts").mkdir()
    shutil.copy(FOLDER / "scripts/run_stack.sh", tmp_path / "scripts")
    assert "there is no npm on the PATH" in refused(tmp_path, tmp_path, PATH=str(commands)), "it is not built there"
    assert "RUNNERS must be a number of processes" in refused(FOLDER, tmp_path, PATH=str(commands), RUNNERS="0")
    assert "SHOP_PORT must be a port" in refused(FOLDER, tmp_path, PATH=str(commands), SHOP_PORT="many")
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = str(occupied.getsockname()[1])
        message = refused(FOLDER, tmp_path, PATH=str(commands), GATEWAY_PORT=port)
    assert f"port {port} of 127.0.0.1 is in use: set GATEWAY_PORT" in message
