"""What is decoded for a completion does not depend, in a single bit, on what else is in flight."""

from __future__ import annotations

import pytest

from agentlightning.engine.completion import Completion
from agentlightning.engine.decoder import SeparateDecoder, generate
from agentlightning.training.learner.policy import Policy


def completions(numbers: range) -> list[Completion]:
    return [Completion(list(range(10, 14 + n % 7)), 12, 0.7 + n / 50, seed=n, top_logprobs=3) for n in numbers]


def found(made: list[Completion]) -> list[object]:
    return [(one.token_ids, one.logprobs, one.likeliest, one.finish_reason) for one in made]


@pytest.mark.heavy
def test_company_changes_no_bit(policy: Policy) -> None:
    alone: list[object] = []
    for number in range(24):
        one = completions(range(number, number + 1))
        generate(SeparateDecoder(policy.model, policy.eos_ids), one)
        alone += found(one)
    together = completions(range(24))
    generate(SeparateDecoder(policy.model, policy.eos_ids), together)
    assert found(together) == alone
    late = completions(range(24))[::-1]
    generate(SeparateDecoder(policy.model, policy.eos_ids), late, max_batch=5)
    assert found(late[::-1]) == alone


def test_what_nobody_waits_for_leaves_and_what_is_cleared_is_given_back(policy: Policy) -> None:
    decoder = SeparateDecoder(policy.model, policy.eos_ids)
    first, second, third = completions(range(3))
    decoder.add([first, second, third])
    first.left = True
    assert first in decoder.step()
    assert len(decoder) == 2
    assert decoder.clear() == [second, third]
    assert len(decoder) == 0
