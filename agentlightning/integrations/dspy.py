"""DSPy: a language model without a cache, so that every call reaches the gateway."""

from __future__ import annotations

from typing import Any

from agentlightning.integrations.packages import package_of
from agentlightning.types import LLM


def dspy_lm(llm: LLM, **settings: Any) -> Any:
    """Return a `dspy.LM` for this attempt, without a cache.

    DSPy caches replies in memory and on disk by default, and a cached reply is not a model call: rollouts of
    one task would share one reply, which could not be trained. `settings` are those of `dspy.LM`, such as
    `model_type="responses"`; they override `llm.sampling_parameters`.

    Use it in a block, `with dspy.context(lm=...)`, or pass it to a module with `set_lm`. Do not use
    `dspy.configure`, which concurrent agents in one process would share.

    Raises:
        ImportError: dspy is not installed.
        ValueError: `settings` enable a cache, or set another model, address or key.
    """
    dspy = package_of("dspy_lm", "dspy", "dspy")
    if settings.pop("cache", False):
        raise ValueError(
            "dspy_lm(cache=True) would return replies from DSPy's cache instead of calling the model. "
            "Remove cache=. To try a program with a cache, create a dspy.LM."
        )
    if conflicts := sorted({"model", "api_base", "base_url", "api_key"} & set(settings)):
        raise ValueError(
            f"dspy_lm uses {', '.join(conflicts)} of the attempt's llm. Remove the setting, or create a dspy.LM."
        )
    own = {"api_base": llm.get_base_url(), "api_key": llm.api_key or "unused", "cache": False}
    return dspy.LM(f"openai/{llm.model}", **{**llm.sampling_parameters, **settings, **own})
