"""Resources of a program's own: classes and dictionaries, from the store to the agent."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import TypeAdapter, ValidationError

import agentlightning as agl
from agentlightning.tracer.conversion import any_attributes
from agentlightning.types import CustomResource, NamedResources, PromptTemplate
from agentlightning.types.resources import agents_form, stored_form


class Retriever(agl.Resource):
    """A resource that has no tag of its own."""

    index: str
    top_k: int = 3


class Judge(agl.Resource):
    """A resource with a tag."""

    resource_type: Literal["judge"] = "judge"  # pyright: ignore[reportIncompatibleVariableOverride] -- narrowed tag
    rubric: list[str]


def test_a_class_of_ones_own_is_stored_by_its_kind_and_comes_back_as_itself() -> None:
    for own, kind in ((Retriever(index="faiss", top_k=5), "Retriever"), (Judge(rubric=["short"]), "judge")):
        stored = stored_form("x", own)
        assert isinstance(stored, CustomResource)
        assert (stored.kind, own.resource_type) == (kind, kind)
        [read] = TypeAdapter(NamedResources).validate_json(json.dumps({"x": stored.model_dump()})).values()
        assert agents_form(read) == own


class HybridRetriever(Retriever):
    """A resource that derives from one without a tag."""

    weight: float = 0.5


class TunedLLM(agl.LLM):
    """A model with a field of the program's own."""

    adapter: str = "base"


def test_a_class_that_derives_from_ones_own_has_a_kind_of_its_own() -> None:
    stored = stored_form("x", HybridRetriever(index="faiss"))
    assert isinstance(stored, CustomResource)
    assert stored.kind == "HybridRetriever"
    assert agents_form(stored) == HybridRetriever(index="faiss")


async def test_a_class_that_derives_from_ours_stays_what_it_is() -> None:
    store = agl.InMemoryLightningStore()
    update = await store.add_resources({"main": TunedLLM(endpoint="http://h/v1", model="m", adapter="tuned")})
    assert update.resources["main"] == TunedLLM(endpoint="http://h/v1", model="m", adapter="tuned")


def test_the_key_of_a_model_is_in_no_text_and_no_span() -> None:
    llm = agl.ProxyLLM(endpoint="http://h/v1", model="m", api_key="sk-hidden")
    assert llm.api_key == "sk-hidden"
    for text in (repr(llm), str(llm), str(any_attributes({"llm": llm})), str(any_attributes({"all": {"llm": [llm]}}))):
        assert "http://h/v1" in text
        assert "sk-hidden" not in text


@pytest.mark.parametrize("kind", ["llm", "custom", "prompt_template"])
def test_no_custom_resource_becomes_one_of_our_classes(kind: str) -> None:
    stored = CustomResource(kind=kind, values={"endpoint": "http://h/v1", "model": "m"})
    assert agents_form(stored) is stored


@pytest.mark.parametrize("kind", [agl.LLM, agl.ProxyLLM])
def test_an_agent_gets_the_parameters_that_its_client_accepts(kind: type[agl.LLM]) -> None:
    every = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stop": ["x"]}
    stored = kind(endpoint="http://h/v1", model="m", sampling_parameters=every)
    got: Any = agents_form(stored)
    left_out = {"top_k", "min_p", "repetition_penalty"} if kind is agl.ProxyLLM else set[str]()
    assert every.keys() - got.sampling_parameters.keys() == left_out
    assert stored.sampling_parameters == every


def test_a_dictionary_is_read_by_key() -> None:
    stored: Any = stored_form("settings", {"temperature": 0.5})
    assert (stored["temperature"], stored.get("top_p", 1.0), "top_p" in stored) == (0.5, 1.0, False)
    assert dict(**stored) == {"temperature": 0.5}
    assert agents_form(stored) is stored
    unknown = CustomResource(kind="not imported here", values={"a": 1})
    assert agents_form(unknown) is unknown


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint": "http://h/v1", "model": "m"}, r"Use agl\.LLM\(\.\.\.\), or add 'resource_type': 'llm'"),
        ({"template": "x", "engine": "jinja"}, r"fields of agl\.PromptTemplate but no resource_type"),
    ],
)
def test_a_dictionary_with_the_fields_of_ours_is_told_its_tag(fields: dict[str, str], message: str) -> None:
    with pytest.raises(agl.BadRequestError, match=message):
        stored_form("main", fields)
    with pytest.raises(agl.BadRequestError, match=message):
        agl.Trainer(initial_resources={"main": fields})  # type: ignore[dict-item]  # pyright: ignore -- a mistake
    with pytest.raises(TypeError, match=r"a subclass of agl\.Resource or a dict; got str"):
        agl.Trainer(initial_resources={"main": "text"})  # type: ignore[dict-item]  # pyright: ignore -- a mistake


def test_jinja2_is_another_word_for_jinja() -> None:
    template = PromptTemplate(template="{{ a }}", engine="jinja2")
    assert (template.engine, template.format(a=1)) == ("jinja", "1")
    with pytest.raises(ValidationError, match="'jinja', 'jinja2', 'f-string' or 'poml'"):
        PromptTemplate.model_validate({"template": "x", "engine": "mustache"})


# --- at the agent ------------------------------------------------------------------------------------------------

PUBLISHED: Any = {
    "retriever": Retriever(index="faiss", top_k=5),
    "judge": Judge(rubric=["short"]),
    "settings": {"temperature": 0.5, "stop": ["a"]},
}


def function_agent(
    task: str,
    retriever: Retriever,
    by_class: Judge,
    settings: dict[str, Any],
    absent: dict[str, int] | None,
    own: dict[str, int] = {"a": 1},  # noqa: B006 -- as programs write it
) -> float:
    """Ask for each resource by its class, or by its name as a dictionary."""
    assert (retriever, by_class) == (PUBLISHED["retriever"], PUBLISHED["judge"])
    assert type(settings) is dict
    assert settings == PUBLISHED["settings"]
    assert (absent, own) == (None, {"a": 1})
    return 1.0


class ClassAgent(agl.LitAgent[str]):
    """An agent that is given all resources by name."""

    def rollout(self, task: str, resources: Any, rollout: agl.Rollout) -> float:
        assert resources["retriever"].top_k == 5
        assert resources["settings"]["temperature"] == 0.5
        return 1.0


@pytest.mark.parametrize("agent", [function_agent, ClassAgent()], ids=["function", "class"])
@pytest.mark.parametrize("strategy", ["shm", pytest.param("cs", marks=pytest.mark.heavy)])
def test_an_agent_gets_what_was_published(agent: Any, strategy: str) -> None:
    trainer = agl.Trainer(strategy=strategy, algorithm="baseline", initial_resources=PUBLISHED)
    trainer.fit(agent, ["x"])
    assert trainer.result.rewards == [1.0]


def test_a_dictionary_that_nobody_published_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def agent(task: str, limits: dict[str, int]) -> float:
        raise AssertionError("not reached")

    evaluation = agl.Trainer(strategy="shm").evaluate(agent, ["x"], resources=PUBLISHED)
    assert evaluation.rewards == [None]
    assert (
        "No CustomResource resource found for the parameter 'limits'; published: retriever (Retriever)" in caplog.text
    )


def test_of_two_classes_of_one_kind_an_agent_gets_the_one_that_it_names() -> None:
    class Index(agl.Resource):
        kind_of_index: str

    first = Index

    class Other(agl.Resource):
        resource_type: Literal["Index"] = "Index"  # pyright: ignore[reportIncompatibleVariableOverride] -- narrowed tag
        kind_of_index: str

    stored: Any = stored_form("index", Index(kind_of_index="flat"))
    assert agents_form(stored) is stored
    assert agents_form(stored, first) == Index(kind_of_index="flat")
    assert agents_form(stored, Other) == Other(kind_of_index="flat")
    assert agents_form(stored, Judge) is stored
