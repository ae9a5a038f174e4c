"""reasoning-gym where it is not installed; the rest is in tests/examples/test_reasoning_gym.py."""

from __future__ import annotations

import importlib.util

import pytest

from agentlightning.environments import reasoning_gym, score_reasoning_gym


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is not None, reason="reasoning-gym is installed")
def test_without_its_package_it_names_the_extra() -> None:
    with pytest.raises(ImportError, match=r"pip install 'agl-framework\[reasoning-gym\]'"):
        reasoning_gym("chain_sum", size=2)
    with pytest.raises(ImportError, match=r"pip install 'agl-framework\[reasoning-gym\]'"):
        score_reasoning_gym("1", {"dataset": "chain_sum", "config": {}, "question": "?", "answer": "1", "metadata": {}})


def test_a_task_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"it has no dataset, config, metadata"):
        score_reasoning_gym("1", {"question": "what is 1 + 1"})
    with pytest.raises(ValueError, match="size must be at least 1"):
        reasoning_gym("chain_sum", size=0)
