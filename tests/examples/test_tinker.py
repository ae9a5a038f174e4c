"""examples/tinker: the answerer, the player on a scripted model, the command line, and the effect of training."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import agentlightning as agl
from tests.examples.shown import EXAMPLES, curve, play, run
from tests.frameworks.engine import Json, call, last, said

PROGRAM = "python examples/tinker/q20_train.py"


@pytest.fixture
def things(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES / "tinker")
    import things  # type: ignore[import-not-found]

    return things


@pytest.fixture
def plays(things: Any) -> Callable[[Json], Callable[[agl.LLM], float]]:
    """Makes an agent of a task: the player, run by a Trainer."""
    from player import plays  # type: ignore[import-not-found]

    def agent_of(task: Json) -> Callable[[agl.LLM], float]:
        def agent(llm: agl.LLM) -> float:
            trainer = agl.Trainer(algorithm="baseline", strategy="shm", initial_resources={"main_llm": llm})
            trainer.fit(plays, train_dataset=[task])
            return trainer.result.mean_reward

        return agent

    return agent_of


def says(*replies: str | Json) -> Callable[[Json], str | Json]:
    """A model that replies with these texts in turn, and with the last one again and again."""

    def model(request: Json) -> str | Json:
        turn = sum(message["role"] == "assistant" for message in request["messages"])
        return replies[min(turn, len(replies) - 1)]

    return model


def test_enough_questions_leave_one_thing_and_no_thing_is_in_two_parts(things: Any) -> None:
    assert len(set(things.THINGS.values())) == len(things.THINGS)
    train_secrets, unknown = things.secrets()
    assert sorted([*train_secrets, *unknown]) == sorted(things.THINGS)
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


def test_each_turn_before_the_right_guess_costs_and_the_model_sees_the_answers(plays: Any, things: Any) -> None:
    task = {"thing": "dog", "search": False}
    reward, requests = play(plays(task), says("is it alive?", "is it big?", "it is a dog"))
    assert reward == pytest.approx(0.95)
    assert [said(last(request)) for request in requests] == [things.RULES, "alive: yes", "big: no"]
    assert not any("tools" in request for request in requests)
    assert {request["temperature"] for request in requests} == {0.5}
    assert play(plays(task), says("it is a dog"))[0] == 1.0
    assert play(plays(task), says("it is a cat"))[0] == 0.0


def test_a_player_that_only_asks_has_twenty_turns_and_no_reward(plays: Any, things: Any) -> None:
    reward, requests = play(plays({"thing": "dog", "search": False}), says("is it alive?", "hello there"))
    assert (reward, len(requests)) == (0.0, things.MOST_TURNS)
    assert said(last(requests[-1])) == things.NOT_UNDERSTOOD


def test_with_search_the_player_has_a_tool_whose_use_is_a_turn(plays: Any) -> None:
    model = says(call("search", query="alive not animal big"), call("look", where="up"), "it is an oak")
    reward, requests = play(plays({"thing": "oak", "search": True}), model)
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


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_it_runs_whole_with_the_tool_and_a_model_that_knows_nothing_finds_next_to_nothing() -> None:
    printed = run(f"{PROGRAM} grpo --port 0 --search --imitation-steps 1 --steps 1 --games 1", timeout=250)
    assert curve(printed)[0] <= 10
    assert "equal_rewards" in printed


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_the_player_learns_to_ask_before_it_guesses() -> None:
    # 240 games: a share of 30 % has a standard deviation of 3 points, the mean number of turns one of 0.6. Three runs
    # ended with 10 to 38 points and 3 to 7 turns more than at first.
    printed = run(f"{PROGRAM} grpo --port 0 --games 20", timeout=1100)
    shares, turns = (
        curve(printed),
        [float(each) for each in re.findall(r"^ +\d+ +\d+% .* (\d+\.\d) ", printed, re.MULTILINE)],
    )
    assert shares[0] <= 25
    assert max(shares[step] for step in shares if step) >= shares[0] + 5
    assert turns[-1] >= turns[0] + 2
