"""Spans as a tree, and the tree as triplets: one triplet per model call, each with its tokens, its agent, its reward.

Departures from the described system (the contract's list of weak points has the reasons):

- Triplets have the order in which the calls were made, not tree order: by the number that the gateway assigned at
  arrival if every call has one, otherwise by start time. Calls of parallel branches have different values of
  `metadata["branch"]`, present where a trace has more than one branch.
- Calls recorded by the gateway are calls too, and a tracer's span of the same response id is the same call.
- A call that failed, or that the store marked as late, has no triplet.
- Metadata has further recorded fields: `finish_reason`, `weight_version`, `policy`, `call_id`, `state` if it is not
  `ok`, `rewards` if there are several dimensions; `response.token_logprobs` holds one number per token.
- Nothing raises for a bad attribute, a cycle or a missing time; excluded parts are listed as `Problem`s.
- `repair.py` places spans without a parent, `reward_matching.py` assigns rewards to calls.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Self

from agentlightning.adapter.calls.calls import ANY_AGENT
from agentlightning.adapter.spans.attributes import Fields, Problem
from agentlightning.adapter.spans.content import image_urls, read_content
from agentlightning.adapter.spans.rewards import is_unusable_reward, reward_dimensions, reward_value
from agentlightning.adapter.spans.tokens import CallReading, has_failed, read_call, response_id
from agentlightning.adapter.tree.node import SpanNode
from agentlightning.adapter.tree.repair import repair
from agentlightning.adapter.tree.reward_matching import RewardMatchPolicy, match_rewards
from agentlightning.adapter.tree.selection import LLM_CALL_MATCH, SelectedCall, SelectionRules, select_calls
from agentlightning.base.private_files import make_private
from agentlightning.semconv import AGL_VIRTUAL
from agentlightning.types import Span, Triplet

VIRTUAL_ROOT: Final = "virtual-root"


class TraceTree(SpanNode):
    """The spans of one attempt as a tree: `span`, its `id`, and its `children` as trees of the same kind."""

    def __init__(self, id: str, span: Span, children: Iterable[Self] | None = None) -> None:
        super().__init__(id, span, children)
        self.problems: list[Problem] = []
        """On the root: the excluded parts, and the reasons."""
        self.is_repaired = False
        """On the root: True if times may replace missing parents."""

    @classmethod
    def from_spans(cls, spans: Sequence[Span]) -> Self:
        """Return the root of the tree; children keep the order of `spans`.

        A parent that is not among the spans becomes a virtual node around its children; several roots get one virtual
        root. Among spans with the same id, the first counts; spans that are their own ancestors are excluded.

        Raises:
            ValueError: there are no spans, or none is a root.
        """
        if not spans:
            raise ValueError("No spans provided to create TraceTree.")
        problems: list[Problem] = []
        nodes: dict[str, Self] = {}
        for span in spans:
            if span.span_id in nodes:
                problems.append(Problem("duplicate_span", span.span_id, f"a second span of this id, named {span.name}"))
            else:
                nodes[span.span_id] = cls(span.span_id, span)
        roots: list[Self] = []
        orphans: dict[str, list[Self]] = {}
        for node in nodes.values():
            parent_id = node.span.parent_id
            if not parent_id:
                roots.append(node)
            elif parent_id in nodes:
                nodes[parent_id].add_child(node)
            else:
                orphans.setdefault(parent_id, []).append(node)
        roots.extend(cls(id, _around(id, AGL_VIRTUAL, children), children) for id, children in orphans.items())
        if not roots:
            raise ValueError("No root spans found in the trace.")
        root = roots[0] if len(roots) == 1 else cls(VIRTUAL_ROOT, _around(VIRTUAL_ROOT, VIRTUAL_ROOT, roots), roots)
        reached = {node.id for node in root.walk()}
        problems.extend(
            Problem("parent_cycle", node.id, "the span is below one of its own descendants")
            for node in nodes.values()
            if node.id not in reached
        )
        root.problems = problems
        return root

    def names_tuple(self) -> tuple[str, list[Any]]:
        """Return `(name, [the same of each child])`; an agent's name follows in brackets."""
        tuples: dict[int, tuple[str, list[Any]]] = {id(node): (node.title(), []) for node in self.walk()}
        for node in self.walk():
            tuples[id(node)][1].extend(tuples[id(child)] for child in node.children)
        return tuples[id(self)]

    def to_json(self) -> Fields:
        """Return the tree as plain values with the keys `id`, `span` and `children`."""
        values: dict[int, Fields] = {
            id(node): {"id": node.id, "span": node.span.model_dump(), "children": []} for node in self.walk()
        }
        for node in self.walk():
            values[id(node)]["children"].extend(values[id(child)] for child in node.children)
        return values[id(self)]

    def visualize(self, filename: str, interested_span_match: str | None = None) -> None:
        """Draw the tree into `filename.png`, spans whose name matches `interested_span_match` filled.

        Raises:
            RuntimeError: the program `dot` of Graphviz is not installed, or it failed.
        """
        program = shutil.which("dot")
        if program is None:
            raise RuntimeError(
                "Drawing a trace requires Graphviz: install the program 'dot' (on Debian: apt-get install graphviz), "
                "or read the tree with to_json() or names_tuple()."
            )
        target = Path(filename if filename.endswith(".png") else filename + ".png")
        make_private(target)
        command = [program, "-Tpng", "-o", str(target)]
        done = subprocess.run(command, input=dot_source(self, interested_span_match), text=True, capture_output=True)
        if done.returncode != 0:
            raise RuntimeError(f"dot could not draw {target}: {done.stderr.strip()}")

    def repair_hierarchy(self) -> None:
        """Move spans without their parent to the position that their times suggest; see `repair.repair`."""
        repair(self)
        self.is_repaired = True

    def find_llm_calls(
        self,
        *,
        llm_call_match: str = LLM_CALL_MATCH,
        agent_match: str | None = None,
        within_matching_subtree: str | None = None,
        within_reward: bool | None = None,
        within_llm_call: bool | None = None,
        existing_llm_call_response_ids: set[str] | None = None,
        exclude_llm_call_in_reward: bool = True,
        dedup_llm_call: bool = True,
    ) -> list[tuple[Self, str]]:
        """Return the model calls with the names of their agents, those that only the gateway recorded after the others.

        The four keywords in the middle describe the position of this tree in a larger one.

        Args:
            within_matching_subtree: The agent that the tree is below, if `agent_match` selects it: calls without a
                known agent belong to it.
            within_reward: True if the tree is below the span of a reward, so that all its calls were made to compute
                the reward. False means `exclude_llm_call_in_reward=True`; None uses that argument.
            within_llm_call: True if the tree is below a model call, so that a call without a response id is part of it.
                False means `dedup_llm_call=True`; None uses that argument.
            existing_llm_call_response_ids: Ids of replies whose calls are already known and are excluded; those of the
                calls in the result are added.
        """
        exclude = exclude_llm_call_in_reward if within_reward is None else True
        dedup = dedup_llm_call if within_llm_call is None else True
        rules = SelectionRules(llm_call_match, agent_match, exclude, dedup, agent_above=within_matching_subtree)
        if within_reward:
            return []
        before = frozenset(existing_llm_call_response_ids or ())
        calls: list[tuple[Any, str]] = []
        for call in select_calls(self, rules, self.problems, by_time=self.is_repaired):
            reply = response_id(call.span)
            if reply in before or (reply is None and within_llm_call and call.record is None):
                continue
            if reply is not None and existing_llm_call_response_ids is not None:
                existing_llm_call_response_ids.add(reply)
            calls.append((call.node, call.agent_name))
        return calls

    def match_rewards(
        self, reward_match: RewardMatchPolicy | str, llm_calls: Sequence[Self]
    ) -> dict[str, float | None]:
        """Return the reward of each node of `llm_calls` by the node's id, according to the policy `reward_match`."""
        calls = [SelectedCall(node, "", "") for node in llm_calls]
        earned = match_rewards(self, calls, RewardMatchPolicy(reward_match)).earned
        return {node.id: reward_value(earned[node.id]) if node.id in earned else None for node in llm_calls}

    def extract_prompt_image_urls(self, prompt_raw_content: object) -> list[str]:
        """Return the addresses of the images in a prompt, a list of messages (`prompt_raw_content`)."""
        return image_urls(prompt_raw_content)

    def span_to_triplet(self, span: Span, agent_name: str) -> Triplet:
        """Return the triplet of one model call, without its reward. Override it to add data to triplets.

        `span` holds all recorded attributes of the call: a tracer's span with those of the gateway's record. Unreadable
        parts are added to `self.problems`. `agent_name` is the agent that made the call.
        """
        call = read_call(span, self.problems)
        content = read_content(span.attributes, span.events)
        response: Fields = {"token_ids": call.completion_token_ids, "raw_content": content.completion}
        if call.logprobs_content is not None:
            response["logprobs"] = call.logprobs_content
        if call.logprobs is not None:
            response["token_logprobs"] = call.logprobs
        return Triplet(
            prompt={
                "token_ids": call.prompt_token_ids,
                "raw_content": content.prompt,
                "image_urls": self.extract_prompt_image_urls(content.prompt),
            },
            response=response,
            metadata={
                "request": content.request,
                "response": content.response,
                "response_id": call.response_id,
                "agent_name": call.role or agent_name if agent_name == ANY_AGENT else agent_name,
                **known_metadata(call, span),
            },
        )

    def to_trajectory(
        self,
        *,
        llm_call_match: str = LLM_CALL_MATCH,
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        dedup_llm_call: bool = True,
        reward_match: RewardMatchPolicy | str = RewardMatchPolicy.FIRST_OCCURRENCE,
        final_reward: float | None = None,
        policy: str | None = None,
        _skip_empty_token_spans: bool = False,
    ) -> list[Triplet]:
        """Return the model calls as triplets in the order in which they were made; see the module for the rules.

        `final_reward` replaces the reward of the last triplet. `policy` selects the calls of one policy.

        Raises:
            ValueError: `reward_match` is unknown.
        """
        rules = SelectionRules(llm_call_match, agent_match, exclude_llm_call_in_reward, dedup_llm_call, policy)
        triplets: list[Triplet] = []
        has_tokens = _has_tokens if _skip_empty_token_spans else None
        for call, branch in self.chosen(rules, RewardMatchPolicy(reward_match), has_tokens):
            triplet = self.span_to_triplet(call.span, call.agent_name)
            if branch is not None:
                triplet.metadata["branch"] = branch
            put_reward(triplet, call.reward)
            triplets.append(triplet)
        if final_reward is not None and triplets:
            triplets[-1].reward = final_reward
        return triplets

    def chosen(
        self,
        rules: SelectionRules,
        reward_match: RewardMatchPolicy,
        has_tokens: Callable[[SelectedCall], bool] | None = None,
    ) -> list[tuple[SelectedCall, str | None]]:
        """Return the calls for training, each with its reward and, if there are several branches, its branch's id.

        They are ordered by arrival at the gateway if it recorded all of them, otherwise by start time. Calls for which
        `has_tokens` is false are excluded. Excluded calls are reported.
        """
        calls = select_calls(self, rules, self.problems, by_time=self.is_repaired)
        by_arrival = all(call.record is not None for call in calls)
        calls.sort(key=attrgetter(*(("sequence_id", "start_time") if by_arrival else ("start_time", "sequence_id"))))
        several = len({call.branch for call in calls}) > 1
        result: list[SelectedCall] = []
        for call in calls:
            if has_failed(call.span):
                self.problems.append(Problem("failed_call", call.node.id, "the agent received no reply from the call"))
            elif has_tokens is not None and not has_tokens(call):
                self.problems.append(Problem("empty_call", call.node.id, "the call has no token ids"))
            else:
                result.append(call)
        matches = match_rewards(self, result, reward_match)
        for call in result:
            call.reward = matches.earned.get(call.node.id)
        for span in matches.lost:
            self.problems.append(Problem("lost_reward", span.span_id, f"reward {reward_value(span)} found no call"))
        for node in self.walk():
            if is_unusable_reward(node.span):
                detail = "the reward is not a finite number, or exceeds 1e15 in magnitude"
                self.problems.append(Problem("bad_reward", node.id, detail))
        return [(call, call.branch if several else None) for call in result]


def _has_tokens(call: SelectedCall) -> bool:
    return read_call(call.span, []).has_tokens


def known_metadata(call: CallReading, span: Span) -> Fields:
    """Return the recorded fields of a call in addition to those of every triplet."""
    metadata: Fields = {}
    if (call_id := call.call_id or (span.span_id if call.response_id is None else None)) is not None:
        metadata["call_id"] = call_id
    if call.finish_reason is not None:
        metadata["finish_reason"] = call.finish_reason
    if call.weight_version is not None:
        metadata["weight_version"] = call.weight_version
    if call.policy is not None:
        metadata["policy"] = call.policy
    if call.call_id is not None and call.state != "ok":
        metadata["state"] = call.state
    return metadata


def put_reward(triplet: Triplet, span: Span | None) -> None:
    if span is None:
        return
    triplet.reward = reward_value(span)
    dimensions = reward_dimensions(span)
    if len(dimensions) > 1:
        triplet.metadata["rewards"] = dimensions


def _around(id: str, name: str, children: Sequence[SpanNode]) -> Span:
    """Return a virtual span above others. The root spans from the first root's start to the last one's end."""
    first = children[0].span
    if id == VIRTUAL_ROOT:
        start, end = first.start_time, children[-1].end_time
    else:
        start = min((child.start_time for child in children if child.start_time is not None), default=None)
        end = max((child.end_time for child in children if child.end_time is not None), default=None)
    return Span.from_attributes(
        attributes={},
        rollout_id=first.rollout_id,
        attempt_id=first.attempt_id,
        sequence_id=first.sequence_id,
        name=name,
        trace_id=first.trace_id,
        span_id=id,
        start_time=start,
        end_time=end,
    )


def dot_source(root: SpanNode, interested_span_match: str | None = None) -> str:
    """Return the tree in Graphviz's language."""
    names = {id(node): f"n{number}" for number, node in enumerate(root.walk())}
    lines = ["digraph trace {", "  rankdir=LR; node [shape=box, fontname=Helvetica];"]
    for node in root.walk():
        filled = interested_span_match is not None and re.search(interested_span_match, node.span.name)
        style = ", style=filled, fillcolor=lightblue" if filled else ""
        label = node.title()
        if node.start_time is not None and node.end_time is not None:
            label += f"\n{node.end_time - node.start_time:.3f} s"
        lines.append(f"  {names[id(node)]} [label={json.dumps(label, ensure_ascii=False)}{style}];")
        lines.extend(f"  {names[id(node)]} -> {names[id(child)]};" for child in node.children)
    return "\n".join([*lines, "}", ""])
