"""examples/webshop: the TypeScript agent, built and run by the real Node, in the real shop; what training brings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.examples.shown import EXAMPLES, run
from tests.frameworks.engine import Engine, Json, call, calls, last, said

FOLDER = EXAMPLES / "webshop"
MODULES = Path(os.environ.get("AGL_TEST_NODE_MODULES", FOLDER / "node_modules"))
WORDS = ("kind", "colour", "material")

needs_node = pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None or not (MODULES / "esbuild").is_dir(),
    reason="node, npm or the packages of package.json are not installed: make test-example NAMES=webshop",
)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    import shop  # type: ignore[import-not-found]

    return shop


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, its types checked and its agent built by its own `npm run build`."""
    folder = tmp_path_factory.mktemp("examples") / "webshop"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("node_modules", "dist", "__pycache__"))
    (folder / "node_modules").symlink_to(MODULES)
    done = subprocess.run(["npm", "run", "build"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def play(built: Path, shop: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[float, list[Json]]]:
    """Runs the agent once on a scripted model; gives its reward and what the model was asked."""
    pytest.importorskip("torch", reason="torch is not installed: make test-example NAMES=webshop")
    monkeypatch.syspath_prepend(built)
    from train import worth  # type: ignore[import-not-found]

    def run_on(model: Callable[[Json], str | Json], task: Json) -> tuple[float, list[Json]]:
        with Engine(model) as engine, shop.serve() as url:
            command = ["node", str(built / "dist/agent.cjs")]
            agent = agl.CommandAgent(command, env={"SHOP_URL": url}, reward="reward_fn", timeout_seconds=60)
            sampling = {"temperature": 0.5, "max_tokens": 24}
            llm = agl.LLM(endpoint=engine.base_url, model="policy", sampling_parameters=sampling)
            trainer = agl.Trainer(
                algorithm="baseline", strategy="shm", initial_resources={"main_llm": llm}, reward_fn=worth
            )
            trainer.fit(agent, train_dataset=[task])
            assert engine.trouble == []
            return trainer.result.mean_reward, [exchange.request for exchange in engine.calls]

    return run_on


def buys(task: Json, size: str, **limit: int) -> Callable[[Json], Json]:
    """A model that searches for the wish, looks at the first result and buys it."""

    def model(request: Json) -> Json:
        heard = [said(message) for message in request["messages"] if message["role"] == "tool"]
        if not heard:
            return call("search", query=" ".join(task[word] for word in WORDS), **limit)
        return call("look", 1, id=heard[0].split()[0]) if len(heard) == 1 else call("buy", 2, size=size)

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
def test_what_the_agent_buys_is_scored_and_the_model_sees_what_the_shop_says(play: Any, shop: Any) -> None:
    task = shop.tasks("train")[0]
    reward, requests = play(buys(task, task["size"], at_most=task["budget"]), task)
    assert reward == 1.0
    assert [(one["temperature"], one["max_tokens"]) for one in requests] == [(0.5, 24)] * 3, "it samples as it is told"
    assert {tool["function"]["name"] for tool in requests[0]["tools"]} == {"search", "look", "buy"}
    found, seen = (said(last(request)) for request in requests[1:])
    assert shop.page(shop.catalogue()[found.split()[0]]) == seen
    assert play(buys(task, "another size", at_most=task["budget"]), task)[0] == 0.0, "the shop does not sell it"
    assert play(buys(task, task["size"]), task)[0] == 0.8, "without a limit the dear one is the first"


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
def test_a_model_that_makes_mistakes_buys_nothing_and_earns_nothing(play: Any, shop: Any, mistake: Any) -> None:
    reward, requests = play(lambda _: mistake, shop.tasks("train")[0])
    assert reward == 0.0
    assert 1 <= len(requests) <= 5


@needs_node
def test_a_program_that_was_not_built_is_named_with_what_to_do(built: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make test-example NAMES=webshop")
    for file in built.glob("*.py"):
        shutil.copy(file, tmp_path)
    with pytest.raises(AssertionError, match=r"is not built: run `npm ci && npm run build` in"):
        run(f"python {tmp_path / 'train.py'}")


def curve(printed: str) -> dict[int, int]:
    """Return updates and the percentage of wishes that were met in full after them."""
    table = printed.partition("updates  met in full")[2]
    return {int(updates): int(full) for updates, full in re.findall(r"^ +(\d+) +(\d+)%", table, re.MULTILINE)}


@needs_node
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_runs_whole_and_a_model_that_earns_nothing_learns_nothing(built: Path) -> None:
    printed = run(f"python {built / 'train.py'} --imitation-steps 1 --steps 1 --held-out 4", timeout=250)
    assert curve(printed) == {0: 0}
    assert "equal_rewards 128" in printed


@needs_node
@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_the_agent_learns_to_heed_the_whole_wish(built: Path) -> None:
    found = curve(run(f"python {built / 'train.py'}", timeout=1100))
    assert found[0] <= 30
    assert found[max(found)] >= found[0] + 40
