"""The spans of an attempt as a tree, repaired like the adapter's: gateway calls are below the spans of the agent."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.adapter.calls.matching import spans_by_call
from agentlightning.adapter.spans.rewards import reward_value
from agentlightning.adapter.tree.tree import VIRTUAL_ROOT, TraceTree
from agentlightning.dashboard.values import SpanNode, SpanTree
from agentlightning.semconv import AGL_VIRTUAL
from agentlightning.types import Span

DEEPEST = 150
"""Maximum depth of the tree, because JSON is written and read recursively. Deeper spans are placed at this level."""


def tree_of(spans: Sequence[Span]) -> SpanTree:
    """Return the tree of one attempt's spans. It is empty without spans, and flat if no span has a valid position."""
    if not spans:
        return SpanTree(roots=[], problems=[])
    spans = _below_their_clients(spans)
    try:
        root = TraceTree.from_spans(spans)
        root.repair_hierarchy()
    except ValueError as error:  # every span has a parent: a cycle
        return SpanTree(roots=[_node(TraceTree(span.span_id, span), []) for span in spans], problems=[str(error)])
    nodes: dict[int, SpanNode] = {}
    depths: dict[int, int] = {id(root): 0}
    above: dict[int, int] = {}
    for node in root.walk():  # parents first
        current = nodes[id(node)] = _node(node, [])
        for child in node.children:
            depth = depths[id(child)] = depths[id(node)] + 1
            above[id(child)] = id(node) if depth <= DEEPEST else above[id(node)]
        if node is not root:
            nodes[above[id(node)]].children.append(current)
    top = nodes[id(root)]
    problems = [f"{problem.kind}: {problem.detail}" for problem in root.problems]
    if (deep := sum(depth > DEEPEST for depth in depths.values())) > 0:
        problems.append(f"too_deep: {deep} spans are more than {DEEPEST} levels deep and are shown at that level")
    return SpanTree(roots=top.children if root.id == VIRTUAL_ROOT else [top], problems=problems)


def _below_their_clients(spans: Sequence[Span]) -> list[Span]:
    """Return the spans, with the gateway's record of a call as a child of the client span of the call."""
    parents: dict[str, str] = {}
    for call in spans_by_call(spans):
        top = call.request or call.record
        client = call.seen if call.is_certain and call.seen is not None else call.client
        if top is not None and client is not None and not top.parent_id:
            parents[top.span_id] = client.span_id
    return [
        span.model_copy(update={"parent_id": parents[span.span_id]}) if span.span_id in parents else span
        for span in spans
    ]


def _node(node: TraceTree, children: list[SpanNode]) -> SpanNode:
    span, virtual = node.span, node.span.name in (VIRTUAL_ROOT, AGL_VIRTUAL)
    return SpanNode(
        span_id=f"virtual-{node.id}" if virtual else node.id,
        name=span.name,
        start_time=node.start_time,
        end_time=node.end_time,
        status_code=span.status.status_code,
        sequence_id=0 if virtual else span.sequence_id,
        agent=node.agent_name(),
        reward=reward_value(span),
        children=children,
    )
