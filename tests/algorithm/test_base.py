"""Algorithm: the parts that are bound are returned, and a part that is missing is named."""

from __future__ import annotations

from typing import Any

import pytest

import agentlightning as agl


class Silent(agl.Algorithm):
    """Does not call `super().__init__`."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> str:
        self.runs += 1
        return "done"


def test_parts_are_kept_by_the_algorithm_that_they_are_bound_to() -> None:
    algorithm, resources = Silent(), {"p": agl.PromptTemplate(template="x", engine="f-string")}
    algorithm.set_store(store := agl.InMemoryLightningStore())
    algorithm.set_adapter(adapter := agl.TracerTraceToTriplet())
    algorithm.set_llm_proxy(proxy := agl.LLMProxy())
    algorithm.set_initial_resources(resources)
    algorithm.set_trainer(trainer := agl.Trainer())
    assert (algorithm.get_store(), algorithm.get_adapter()) == (store, adapter)
    assert (algorithm.get_llm_proxy(), algorithm.get_trainer()) == (proxy, trainer)
    assert algorithm.get_initial_resources() is resources

    other = Silent()
    assert (other.get_llm_proxy(), other.get_initial_resources()) == (None, None)
    for name, part in [("get_store", "Store"), ("get_adapter", "Adapter"), ("get_trainer", "Trainer")]:
        with pytest.raises(ValueError, match=f"{part} has not been set"):
            getattr(other, name)()


def test_calling_an_algorithm_runs_it_and_the_base_class_asks_for_run_and_has_no_old_client() -> None:
    algorithm = Silent()
    assert (algorithm(), algorithm.runs, algorithm.is_async()) == ("done", 1, False)
    with pytest.raises(NotImplementedError, match="must define run"):
        agl.Algorithm().run()
    with pytest.raises(NotImplementedError, match="use get_store"):
        agl.Algorithm().get_client()
