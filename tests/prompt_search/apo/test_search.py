"""Parts of the beam search on their own."""

from __future__ import annotations

from agentlightning.prompt_search.apo.leading import leader_of
from agentlightning.prompt_search.apo.steps import prefix_of
from agentlightning.prompt_search.history import PromptVersion
from agentlightning.prompt_search.scores import score_of
from tests.prompt_search.apo.parts import resources
from tests.prompt_search.test_cases import result


def version(name: str, *rewards: float) -> PromptVersion:
    made = PromptVersion(name, resources(), "main_prompt")
    if rewards:
        made.judged(score_of([result(reward) for reward in rewards]))
    return made


def test_the_leader_is_the_one_of_which_it_is_surest() -> None:
    """Weak point 12: two lucky tasks are no better than thirty good ones."""
    lucky, good, unknown = version("v1", 1.0, 1.0), version("v2", *[1.0] * 27, *[0.0] * 3), version("v3")
    assert lucky.score is not None
    assert good.score is not None
    assert lucky.score > good.score
    assert leader_of([lucky, unknown, good]) is good
    assert leader_of([unknown]) is unknown


def test_the_beginning_of_a_log_line() -> None:
    assert prefix_of(0, version="v0") == "[Round 00 | Prompt v0]"
    assert prefix_of(3, 2, 10, "v12") == "[Round 03 | Beam 02 | Branch 10 | Prompt v12]"
