"""Arguments of LLMProxy that programs for the older system pass and that cannot be honoured: refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentlightning.store.base import LightningStore
from agentlightning.utils.server_launcher import LaunchMode


def check_capability(store: LightningStore, launch_mode: LaunchMode) -> None:
    """Let a store pass that can be called from the serving loop.

    Raises:
        RuntimeError: it cannot; says how to make it so.
    """
    capabilities, name = store.capabilities, type(store).__name__
    if launch_mode == "thread" and not capabilities.get("thread_safe"):
        raise RuntimeError(
            f"The store is not thread-safe. {name} cannot be called from the gateway's thread: "
            "wrap it in LightningStoreThreaded, or use launch_mode='asyncio'"
        )
    if launch_mode == "asyncio" and not capabilities.get("async_safe"):
        raise RuntimeError(f"The store is not async-safe. {name} cannot be called from the gateway's loop")


def refuse_what_has_no_effect(
    litellm_config: Mapping[str, object] | None,
    middlewares: Sequence[object] | None,
    callbacks: Sequence[object] | None,
    num_workers: int,
) -> None:
    """Let only values pass that ask for nothing.

    Raises:
        ValueError: an argument asks for what this gateway does not do; names it and what to use instead.
    """
    if litellm_config:
        raise ValueError(
            "litellm_config is not supported: this gateway does not run on LiteLLM. Give models in model_list, "
            "retries as num_retries, and bounds as limits"
        )
    if middlewares:
        raise ValueError(
            "middlewares is not supported: attribution by URL is always on, and nothing can be put between"
        )
    if callbacks:
        raise ValueError(
            "callbacks is not supported: token ids, log-probabilities and the spans of each call are always recorded"
        )
    if num_workers != 1:
        raise ValueError(f"num_workers must be 1: the gateway serves from one loop; got {num_workers}")
