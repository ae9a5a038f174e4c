"""Exceptions and texts of an agent that no store, log or handler accepts unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.semconv import CHANGED_TEXTS
from agentlightning.store.base import LightningStore
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.spec import store_from_spec
from tests.stubs.running import run_tasks


class NoAttributes(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(f"no {name}")


class NoClass(Exception):
    @property
    def __class__(self) -> Any:  # type: ignore[override] -- as hostile as can be
        raise RuntimeError("no class")


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class NoTraceback(Exception):
    __traceback__ = property(lambda self: 5)  # type: ignore[assignment] -- as above


class NoPickle(Exception):
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class _Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__mro__", "__qualname__", "__module__", "__name__"):
            raise RuntimeError("no name")
        return super().__getattribute__(name)


class NoName(Exception, metaclass=_Meta):
    pass


def _cycle() -> Exception:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


def _deep() -> Exception:
    error = ValueError("0")
    for number in range(20_000):
        error, inner = ValueError(str(number)), error
        error.__cause__ = inner
    return error


HOSTILE: dict[str, Callable[[], BaseException]] = {
    "attributes": lambda: NoAttributes("x"),
    "class": lambda: NoClass("x"),
    "text": lambda: NoText("x"),
    "traceback": lambda: NoTraceback("x"),
    "pickle": lambda: NoPickle("x"),
    "name": lambda: NoName("x"),
    "group": lambda: ExceptionGroup("g", [NoAttributes("x"), NoText("y")]),
    "cycle": _cycle,
    "deep": _deep,
    "long": lambda: ValueError("x" * 20_000_000),
    "surrogate": lambda: ValueError("a\ud800b"),
}


@agl.rollout
def raises(task: str) -> float:
    raise HOSTILE[task]()


@agl.rollout
async def raises_in_operation(task: str) -> float:
    with agl.operation(name="inside"):
        raise HOSTILE[task]()


@agl.rollout
def emits(task: str) -> float:
    agl.emit_exception(HOSTILE[task]())
    return 1.0


class Hostile(agl.Hook):
    async def on_trace_end(self, **_: Any) -> None:
        raise NoName("of a hook")

    async def on_rollout_end(self, **_: Any) -> None:
        raise ExceptionGroup("g", [NoClass("of a hook")])


@pytest.mark.parametrize("agent", [raises, raises_in_operation])
async def test_a_hostile_exception_is_the_agents_and_the_runner_goes_on(serve: Callable[..., Any], agent: Any) -> None:
    finished = await serve(agent, *HOSTILE)
    endings = {each.input: (each.status, each.attempt.outcome, each.attempt.outcome_reason) for each in finished}
    assert endings == dict.fromkeys(HOSTILE, ("failed", "infrastructure_fault", "exception"))
    for each in finished:
        assert each.attempt.error is not None
        assert len(each.attempt.error.message) <= 4096
        json.dumps(each.model_dump(), ensure_ascii=False).encode()


@pytest.mark.heavy
async def test_a_hostile_exception_in_a_process_of_its_own_is_the_agents(serve: Callable[..., Any]) -> None:
    finished = await serve(raises, *HOSTILE, isolation="process")
    assert {each.input: each.attempt.outcome for each in finished} == dict.fromkeys(HOSTILE, "infrastructure_fault")


async def test_hostile_exceptions_can_be_emitted_and_raised_by_hooks(serve: Callable[..., Any]) -> None:
    finished = await serve(emits, *HOSTILE, hooks=[Hostile()])
    assert {each.input: each.attempt.outcome for each in finished} == dict.fromkeys(HOSTILE, "scored")


HALF, WHOLE = "\ud83d", "\ud83d\ude00"


@agl.rollout
def says_halves(task: str) -> dict[str, float]:
    agl.emit_message(f"a{HALF}b{WHOLE}")
    agl.emit_annotation({f"key{HALF}": f"v{HALF}", "list": ["plain", HALF], "ids": [1, 2]})
    agl.emit_exception(ValueError(HALF))
    with agl.operation(name=f"op{HALF}") as op:
        op.set_output(HALF)
    return {"reward": 1.0, f"style{HALF}": 0.5}


@pytest.mark.parametrize("place", ["memory", "file"])
async def test_half_a_surrogate_pair_is_replaced_and_marked(
    serve: Callable[..., Any], store: InMemoryLightningStore, tmp_path: Path, place: str
) -> None:
    chosen: LightningStore = store if place == "memory" else store_from_spec(f"sqlite:///{tmp_path / 'a.db'}")
    (finished,) = await run_tasks(chosen, says_halves, "x")
    spans = list(await chosen.query_spans(finished.rollout_id))
    assert (finished.attempt.outcome, agl.find_final_reward(spans)) == ("scored", 1.0)
    "".join(span.model_dump_json() for span in spans).encode()
    message = next(span for span in spans if span.name == "agentlightning.message")
    assert message.attributes["agentlightning.message.body"] == "a\ufffdb\N{GRINNING FACE}"
    assert message.attributes[CHANGED_TEXTS] == ["agentlightning.message.body"]
    note = next(span for span in spans if "list" in span.attributes)
    assert note.attributes == {
        "key\ufffd": "v\ufffd",
        "list": ["plain", "\ufffd"],
        "ids": [1, 2],
        CHANGED_TEXTS: ["key\ufffd", "list"],
    }
    if place == "file":
        await chosen.close()


@agl.rollout
def says_much(task: int) -> float:
    agl.emit_message("x" * task)
    return 1.0


async def test_an_endless_message_is_cut_and_marked(serve: Callable[..., Any], store: InMemoryLightningStore) -> None:
    (finished,) = await serve(says_much, 100_000_000)
    (message,) = await store.query_spans(finished.rollout_id, name="agentlightning.message")
    body = message.attributes["agentlightning.message.body"]
    assert isinstance(body, str)
    assert (len(body) < 9_000_000, body[-30:]) == (True, "xxxxxxx... (100000000 characters)"[-30:])
    assert message.attributes[CHANGED_TEXTS] == ["agentlightning.message.body"]
    assert finished.attempt.outcome == "scored"
