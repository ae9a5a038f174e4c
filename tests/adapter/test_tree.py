"""Spans become a tree: its shape, its repair, and what happens to spans that fit nowhere."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.adapter import TraceTree
from agentlightning.adapter.tree.tree import dot_source
from agentlightning.types import Span
from tests.adapter.span_maker import chat, reward, span, with_attributes


def names(tree: TraceTree) -> list[str]:
    return [node.id for node in tree.traverse()]


def children(tree: TraceTree, id: str) -> list[str]:
    node = tree.find_id(id)
    assert node is not None
    return [child.id for child in node.children]


def test_children_keep_the_order_of_the_spans() -> None:
    tree = TraceTree.from_spans([span("b", "b", "S", 5, 6), span("S", "s", None, 0, 9), span("a", "a", "S", 1, 2)])
    assert names(tree) == ["S", "b", "a"]


def test_a_missing_parent_becomes_a_virtual_node_around_its_children() -> None:
    tree = TraceTree.from_spans([span("a", "a", "gone", 3, 4), span("b", "b", "gone", 1, 2)])
    assert (tree.id, tree.span.name, tree.start_time, tree.end_time) == ("gone", "agentlightning.virtual", 1, 4)


def test_a_missing_parent_of_children_without_times_has_none_either() -> None:
    tree = TraceTree.from_spans([span("a", "a", "gone", None, None)])
    assert (tree.start_time, tree.end_time) == (None, None)


def test_several_roots_get_one_virtual_root() -> None:
    tree = TraceTree.from_spans([span("a", "a", None, 1, 2), span("x", "x", "gone", 3, 4), span("b", "b", None, 5, 6)])
    assert (tree.id, tree.span.name, tree.start_time, tree.end_time) == ("virtual-root", "virtual-root", 1, 4)
    assert children(tree, "virtual-root") == ["a", "b", "gone"]


def test_no_spans_and_only_cycles_have_no_tree() -> None:
    with pytest.raises(ValueError, match="No spans provided to create TraceTree"):
        TraceTree.from_spans([])
    with pytest.raises(ValueError, match="No root spans found in the trace"):
        TraceTree.from_spans([span("a", "a", "b", 0, 1), span("b", "b", "a", 0, 1)])


def test_a_cycle_beside_a_root_and_a_second_span_of_one_id_are_reported() -> None:
    tree = TraceTree.from_spans(
        [
            span("S", "s", None, 0, 1),
            span("a", "a", "b", 0, 1),
            span("b", "b", "a", 0, 1),
            span("S", "again", None, 0, 1),
        ]
    )
    assert names(tree) == ["S"]
    assert [(problem.kind, problem.span_id) for problem in tree.problems] == [
        ("duplicate_span", "S"),
        ("parent_cycle", "a"),
        ("parent_cycle", "b"),
    ]


def test_a_trace_of_ten_thousand_nested_spans_is_no_trouble() -> None:
    spans = [span("0", "s", None, 0, 20_001)]
    spans += [span(str(depth), "s", str(depth - 1), depth, 20_001 - depth) for depth in range(1, 10_000)]
    tree = TraceTree.from_spans([*spans, chat("c", "9999", 10_000, 10_000.5), reward("r", "9999", 10_000.7, 1.0)])
    tree.repair_hierarchy()
    assert [triplet.reward for triplet in tree.to_trajectory()] == [1.0]
    assert tree.to_json()["children"][0]["id"] == "1"


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({"agent.name": "a"}, "a"),
        ({"agentops.span.kind": "agent", "operation.name": "b"}, "b"),
        ({"operation.name": "b"}, None),
        ({"recipient_agent_type": "c"}, "c"),
        ({"langchain.chain.type": "d"}, "d"),
        ({"executor.id": "e"}, "e"),
        ({"type": "agent", "agentlightning.operation.input.name": "f"}, "f"),
        ({"lc_name": "g"}, None),
    ],
)
def test_an_agent_is_known_by_the_attributes_of_its_framework(attributes: dict[str, str], name: str | None) -> None:
    made = with_attributes(span("s", "some.span", None, 0, 1), attributes)
    assert TraceTree("s", made).agent_name() == name


def test_a_chain_of_langchain_is_known_by_its_name() -> None:
    made = with_attributes(span("s", "langchain.Chain.x", None, 0, 1), {"lc_name": "g"})
    assert TraceTree("s", made).names_tuple() == ("langchain.Chain.x [g]", [])


def test_a_span_moves_below_the_tightest_one_around_it() -> None:
    tree = TraceTree.from_spans(
        [
            span("S", "s", None, 0, 20),
            span("P", "p", "S", 1, 10),
            span("Q", "q", "P", 2, 6),
            span("lost", "l", "S", 3, 4),
            span("same", "m", "S", 1, 10),
        ]
    )
    tree.repair_hierarchy()
    assert children(tree, "S") == ["P", "same"]
    assert children(tree, "Q") == ["lost"]


def test_a_parent_never_moves_below_its_own_longer_lived_child() -> None:
    spans = [
        span("S", "s", None, 0, 20),
        span("P", "p", "S", 2, 5),
        span("late", "background", "P", 1, 9),
        chat("c", "late", 3, 4),
        span("other", "o", "S", 11, 12),
    ]
    tree = TraceTree.from_spans(spans)
    tree.repair_hierarchy()
    assert len(names(tree)) == len(spans)
    assert children(tree, "P") == ["late"]


def test_a_model_call_never_becomes_a_parent() -> None:
    tree = TraceTree.from_spans([span("S", "s", None, 0, 20), chat("long", "S", 1, 9), chat("short", "S", 2, 3)])
    tree.repair_hierarchy()
    assert children(tree, "S") == ["long", "short"]


@st.composite
def traces(draw: st.DrawFn) -> list[Span]:
    spans = [span("0", "root", None, 0, 10)]
    for place in range(1, draw(st.integers(2, 12))):
        start, end = sorted((draw(st.integers(0, 6)), draw(st.integers(0, 6))))
        parent = draw(st.integers(0, place - 1))
        has_time = draw(st.integers(0, 9)) > 0
        spans.append(span(str(place), "n", str(parent), float(start) if has_time else None, float(end)))
    return spans


def slowly_repaired(spans: list[Span]) -> dict[str, str]:
    """Parent of each span after repair, by comparing every child of the first fork with every other span."""
    tree = TraceTree.from_spans(spans)
    fork = tree
    while len(fork.children) == 1:
        fork = fork.children[0]
    order = fork.traverse()[1:]
    parents = {child.id: node.id for node in tree.traverse() for child in node.children}
    moving = list(fork.children)
    count = len(moving)
    for child in moving:
        best: tuple[float, int] | None = None
        for place, other in enumerate(order):
            times = (child.start_time, child.end_time, other.start_time, other.end_time)
            if count == 1 or other is child or None in times:
                continue
            start, end, begin, finish = (time or 0.0 for time in times)
            above, at = False, other.id
            while at in parents:
                above = above or at == child.id
                at = parents[at]
            if begin <= start and finish >= end and finish - begin > end - start and not above:
                best = min(best or (finish - begin, place), (finish - begin, place))
        if best is not None:
            parents[child.id] = order[best[1]].id
            count -= 1
    return parents


@settings(max_examples=400, deadline=None)
@given(traces())
def test_repair_loses_nothing_and_agrees_with_the_slow_rule(spans: list[Span]) -> None:
    tree = TraceTree.from_spans(spans)
    tree.repair_hierarchy()
    assert sorted(names(tree)) == sorted(made.span_id for made in spans)
    assert {child.id: node.id for node in tree.traverse() for child in node.children} == slowly_repaired(spans)


def test_the_picture_names_every_span_and_fills_those_asked_for() -> None:
    tree = TraceTree.from_spans([span("S", "run", None, 0, 2), chat("c", "S", 0, 1)])
    source = dot_source(tree, r"chat")
    assert "run" in source
    assert source.count("fillcolor") == 1


def test_a_picture_is_drawn_or_the_missing_program_is_named(tmp_path: Path) -> None:
    tree = TraceTree.from_spans([span("S", "run", None, 0, 2)])
    if shutil.which("dot"):
        tree.visualize(str(tmp_path / "trace"))
        assert (tmp_path / "trace.png").stat().st_size > 0
    else:
        with pytest.raises(RuntimeError, match="dot"):
            tree.visualize(str(tmp_path / "trace"))


def test_the_order_of_rewards_does_not_depend_on_the_order_of_the_spans() -> None:
    spans = [span("S", "s", None, 0, 90)]
    spans += [chat(f"c{place}", "S", place * 2, place * 2 + 1) for place in range(20)]
    spans += [reward(f"r{place}", "S", place * 2 + 1.5, float(place)) for place in range(20)]
    expected = [float(place) for place in range(20)]
    for seed in range(5):
        random.Random(seed).shuffle(spans)
        assert [triplet.reward for triplet in TraceTree.from_spans(spans).to_trajectory()] == expected
