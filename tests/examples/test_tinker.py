"""examples/tinker: the answerer, the player on a scripted model, the command line, and what training brings."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import agentlightning as agl
from tests.examples.shown import EXAMPLES, run
from tests.frameworks.engine import Engine, Json, call, last, said

PROGRAM = "python examples/tinker/q20_train.py"


@pytest.fixture
def things(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES / "tinker")
    import things  # type: ignore[import-not-found]

    return things


@pytest.fixture
def play(things: Any) -> Callable[..., tuple[float, list[Json]]]:
    """Runs the player once on a scripted model; gives its reward and what the model was asked."""
    from player import plays  # type: ignore[import-not-found]

    def run_on(model: Callable[[Json], str | Json], task: Json) -> tuple[float, list[Json]]:
        with Engine(model) as engine:
            llm = agl.LLM(endpoint=engine.base_url, model="policy", sampling_parameters={"temperature": 0.5})
            trainer = agl.Trainer(algorithm="baseline", strategy="shm", initial_resources={"main_llm": llm})
            trainer.fit(plays, train_dataset=[task])
            assert engine.trouble == []
            return trainer.result.mean_reward, [exchange.request for exchange in engine.calls]

    return run_on


def says(*replies: str | Json) -> Callable[[Json], str | Json]:
    """A model that says one after another, and the last one again and again."""

    def model(request: Json) -> str | Json:
        turn = sum(message["role"] == "assistant" for message in request["messages"])
        return replies[min(turn, len(replies) - 1)]

    return model


def test_enough_questions_leave_one_thing_and_no_thing_is_in_two_parts(things: Any) -> None:
    assert len(set(things.THINGS.values())) == len(things.THINGS)
    known, unknown = things.secrets()
    assert sorted([*known, *unknown]) == sorted(things.THINGS)
    assert not set(things.THINGS) & set(things.PROPERTIES), "a guess would be read as a question"


@pytest.mark.parametrize(
    ("text", "kind", "word"),
    [
        ("is it alive?", "question", "alive"),
        ("Does it FLY?", "question", "fly"),
        ("Is it an animal?", "question", "animal"),
        ("it is a dog", "guess", "dog"),
        ("I think it's the Piano!", "guess", "piano"),
        ("Is it a unicorn?", "guess", "unicorn"),
        ("dog", "guess", "dog"),
    ],
)
def test_questions_and_guesses_are_understood_as_people_write_them(
    things: Any, text: str, kind: str, word: str
) -> None:
    assert things.understood(text) == (kind, word)


@pytest.mark.parametrize("text", ["", "hello there", "is it big or round?", "tell me more"])
def test_what_is_neither_one_question_nor_a_guess_is_not_understood(things: Any, text: str) -> None:
    assert things.understood(text) is None


def test_a_search_finds_things_that_have_what_is_wanted_and_not_what_is_refused(things: Any) -> None:
    assert things.search("alive not animal") == "oak\nrose\ncactus"
    assert things.search("alive big not animal") == "oak"
    assert things.search("alive fly metal") == things.search("") == things.search("unicorn") == things.NOTHING


def test_each_turn_before_the_right_guess_costs_and_the_model_sees_the_answers(play: Any, things: Any) -> None:
    task = {"thing": "dog", "search": False}
    reward, requests = play(says("is it alive?", "is it big?", "it is a dog"), task)
    assert reward == pytest.approx(0.95)
    assert [said(last(request)) for request in requests] == [things.RULES, "alive: yes", "big: no"]
    assert not any("tools" in request for request in requests)
    assert {request["temperature"] for request in requests} == {0.5}
    assert play(says("it is a dog"), task)[0] == 1.0
    assert play(says("it is a cat"), task)[0] == 0.0


def test_a_player_that_only_asks_has_twenty_turns_and_no_reward(play: Any, things: Any) -> None:
    reward, requests = play(says("is it alive?", "hello there"), {"thing": "dog", "search": False})
    assert (reward, len(requests)) == (0.0, things.MOST_TURNS)
    assert said(last(requests[-1])) == things.NOT_UNDERSTOOD


def test_with_search_the_player_has_a_tool_whose_use_is_a_turn(play: Any) -> None:
    model = says(call("search", query="alive not animal big"), call("look", where="up"), "it is an oak")
    reward, requests = play(model, {"thing": "oak", "search": True})
    assert reward == pytest.approx(0.95)
    assert [tool["function"]["name"] for tool in requests[0]["tools"]] == ["search"]
    assert [said(last(request)) for request in requests[1:]] == ["oak", "nothing"]


def test_the_options_are_those_of_the_document(things: Any) -> None:
    from q20_train import arguments  # type: ignore[import-not-found]

    options = arguments().parse_args(["verl"])
    assert (options.algorithm, options.model, options.port, options.search) == ("verl", "qwen3", 4747, False)
    options = arguments().parse_args(["verl", "--model", "qwen25", "--port", "4748", "--search"])
    assert (options.model, options.port, options.search) == ("qwen25", 4748, True)
    assert arguments().parse_args(["tinker"]).model == "qwen3"
    with pytest.raises(SystemExit):
        arguments().parse_args(["verl", "--model", "qwen2"])


def curve(printed: str) -> dict[int, int]:
    """Return updates and the percentage of games that were won after them."""
    table = printed.partition("updates  found")[2]
    return {int(updates): int(found) for updates, found in re.findall(r"^ +(\d+) +(\d+)%", table, re.MULTILINE)}


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_it_runs_whole_with_the_tool_and_a_model_that_knows_nothing_finds_next_to_nothing() -> None:
    printed = run(f"{PROGRAM} grpo --port 0 --search --imitation-steps 1 --steps 1 --games 1", timeout=250)
    assert curve(printed)[0] <= 10
    assert "equal_rewards" in printed


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_the_player_learns_to_ask_before_it_guesses() -> None:
    found = curve(run(f"{PROGRAM} grpo --port 0", timeout=1100))
    assert found[0] <= 25
    assert found[max(found)] >= found[0] + 15
