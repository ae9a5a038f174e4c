"""What the gateway asks of the store: numbers for calls, and that their spans are kept before they are answered."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable
from typing import TypeVar

from agentlightning.errors import AgentLightningError, BusyError
from agentlightning.llm_proxy.calls import ModelCall
from agentlightning.llm_proxy.privacy import Privacy
from agentlightning.llm_proxy.replies import CallFailed, refuse
from agentlightning.llm_proxy.spans import spans_of
from agentlightning.store.base import LightningStore
from agentlightning.tracer.mirror import mirror_spans

logger = logging.getLogger(__name__)
T = TypeVar("T")
_FIRST_PAUSE = 0.05


async def ask_store(question: Awaitable[T], seconds: float) -> T:
    """Await the store's answer.

    Raises:
        CallFailed: 503, the store did not answer in time or failed. One raised by the question itself passes.
    """
    try:
        return await asyncio.wait_for(question, seconds)
    except CallFailed:
        raise
    except Exception as error:  # boundary: any failure of a store, ours or a user's, is an answer for the agent
        logger.error("the store failed before a model call: %r", error)
        text = f"The store cannot be asked about this attempt ({type(error).__name__}); the call was not made"
        raise refuse(503, text, code="store_unavailable", retry_after=1.0) from error


async def keep(store: LightningStore, call: ModelCall, privacy: Privacy, seconds: float) -> Exception | None:
    """Store the two spans of a call in one step, and offer them to the mirror; return None, or why they are lost.

    Tried again while `seconds` last, unless the store says that they are wrong. Safe to repeat: the store knows the
    spans by their ids.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    try:
        spans = privacy.apply(spans_of(call))
    except Exception as error:  # boundary: a call that we cannot write down must not pass as recorded
        return error
    while True:
        try:
            await asyncio.wait_for(store.add_many_spans(spans), max(0.01, deadline - time.monotonic()))
            mirror_spans(spans)
            return None
        except Exception as error:  # boundary: see `ask_store`
            if is_final(error) or time.monotonic() + pause >= deadline:
                return error
        await asyncio.sleep(pause * random.uniform(0.75, 1.25))
        pause *= 2


def is_final(error: Exception) -> bool:
    """True if the store would say the same to the same spans again."""
    if isinstance(error, AgentLightningError):
        return error.http_status < 500 and not isinstance(error, BusyError)
    return isinstance(error, (TypeError, ValueError, NotImplementedError))
