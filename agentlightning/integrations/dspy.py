"""DSPy: a language model without a cache, which calls the gateway each time."""

from __future__ import annotations

from typing import Any

from agentlightning.integrations.packages import package_of
from agentlightning.types import LLM


def dspy_lm(llm: LLM, **settings: Any) -> Any:
    """Return a `dspy.LM` for this attempt, without a cache.

    DSPy caches answers in memory and on disk by default, and a cached answer is not a model call: rollouts of
    one task would share one answer, which could not be trained. `settings` are those of `dspy.LM`, such as
    `model_type="responses"`; they override `llm.sampling_parameters`.

    Use it for a block, `with dspy.context(lm=...)`, or pass it to a module by `set_lm`: concurrent agents in
    one process must not share `dspy.configure`.

    Raises:
        ImportError: dspy is not installed.
        ValueError: `settings` enable a cache, or set another model, address or key.
    """
    dspy = package_of("dspy_lm", "dspy", "dspy")
    if settings.pop("cache", False):
        raise ValueError(
            "dspy_lm(cache=True) would answer from DSPy's cache, and such an answer is no call of the model: "
            "leave cache out. To try a program with a cache, make a dspy.LM yourself."
        )
    if conflicts := sorted({"model", "api_base", "base_url", "api_key"} & set(settings)):
        raise ValueError(
            f"dspy_lm takes {', '.join(conflicts)} from the llm of the attempt: leave it out, or make a dspy.LM."
        )
    own = {"api_base": llm.get_base_url(), "api_key": llm.api_key or "none", "cache": False}
    return dspy.LM(f"openai/{llm.model}", **{**llm.sampling_parameters, **settings, **own})
