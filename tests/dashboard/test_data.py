"""Requests of the page beyond the store's own operations: explanations, trees, conversations, comparisons."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from agentlightning.adapter.calls.conversation import Line
from agentlightning.dashboard import conversation
from agentlightning.store.client_server import LightningStoreServer
from agentlightning.types import AttemptedRollout, PromptTemplate, RunRecord, Span
from tests.adapter.span_maker import chat, gateway_call, reward, span, spoken_call, with_attributes

API = "/v1/agl"


class Page:
    """A store server with the requests of the page."""

    def __init__(self, server: LightningStoreServer, session: aiohttp.ClientSession) -> None:
        self.store, self._server, self._session = server.store, server, session

    async def get(self, path: str, status: int = 200) -> Any:
        async with self._session.get(f"{self._server.endpoint}{API}{path}") as reply:
            body = await reply.json()
            assert reply.status == status, body
            return body

    async def played(self, spans: Sequence[Span], *, mode: str = "train", end: bool = True) -> AttemptedRollout:
        rollout = await self.store.start_rollout({"question": "1 + 1"}, mode=mode, run_id="run")  # type: ignore[arg-type]
        place = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        await self.store.add_many_spans([each.model_copy(update=place) for each in spans])
        if end:
            await self.store.update_attempt(
                rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded", outcome="scored"
            )
        return rollout

    async def conversation(self, rollout: AttemptedRollout) -> list[dict[str, Any]]:
        answer = await self.get(f"/rollouts/{rollout.rollout_id}/attempts/{rollout.attempt.attempt_id}/conversation")
        return answer["calls"]


@pytest.fixture
async def page(server: LightningStoreServer) -> AsyncIterator[Page]:
    async with aiohttp.ClientSession() as session:
        yield Page(server, session)


# --- explanation -----------------------------------------------------------------------------------------------------


async def test_each_call_says_what_the_ledger_did_with_it_or_why_it_is_in_no_row(page: Page) -> None:
    spans = [
        *gateway_call("c1", 1, [1, 2], [3, 4]),
        *gateway_call("c2", 2, [1, 2], [], state="client_left"),
        reward("r", None, 9.0, 1.0, sequence_id=3),
    ]
    rollout = await page.played(spans)
    await page.store.start_run("run", algorithm="GRPO")
    entry = {"call_id": "c1", "attempt_id": rollout.attempt.attempt_id, "ending": "trained", "reason": None}
    entry |= {"row": 4, "tokens": 2, "advantage": 0.5, "weight_version": 7}
    data = {"calls": [entry, "a record that another program wrote", {"call_id": 3}]}
    await page.store.add_run_records("run", [RunRecord(kind="ledger", step=2, name=rollout.rollout_id, data=data)])
    explanation = await page.get(f"/rollouts/{rollout.rollout_id}/explanation")
    assert (explanation["reward"], explanation["outcome"], explanation["rows"]) == (1.0, "scored", 1)
    first, second = explanation["calls"]
    assert (first["row"], first["begins"], first["reason"]) == (1, "first_call", None)
    assert first["ledger"] == {
        **{"ending": "trained", "reason": None, "row": 4, "advantage": 0.5, "weight_version": 7},
        "step": 2,
    }
    assert first["span_ids"] == ["req-c1", "raw-c1"]
    assert (second["row"], second["reason"], second["ledger"]) == (None, "client_left", None)
    assert "increase the timeout" in second["what_to_try"]


async def test_where_nothing_trains_the_explanation_says_so_and_gives_no_advice_for_training(page: Page) -> None:
    calls = gateway_call("c1", 1, [1], [], state="no_tokens")
    await page.store.start_run("run", algorithm="GRPO")
    trained, evaluated = await page.played(calls), await page.played(calls, mode="val")
    for rollout, reason in ((trained, None), (evaluated, "it is for evaluation (mode val)")):
        explanation = await page.get(f"/rollouts/{rollout.rollout_id}/explanation")
        assert (explanation["untrained"], bool(explanation["notes"])) == (reason, reason is None)
    await page.store.start_run("run", algorithm="Baseline")
    explanation = await page.get(f"/rollouts/{trained.rollout_id}/explanation")
    assert (explanation["untrained"], explanation["notes"]) == ("Baseline trains no weights", [])


async def test_an_attempt_is_explained_alone_if_it_is_asked_for(page: Page) -> None:
    rollout = await page.played(gateway_call("c1", 1, [1], [2]), end=False)
    again = await page.store.start_attempt(rollout.rollout_id)
    place = {"rollout_id": rollout.rollout_id, "attempt_id": again.attempt.attempt_id}
    await page.store.add_many_spans([s.model_copy(update=place) for s in gateway_call("c2", 2, [1], [2])])
    both = await page.get(f"/rollouts/{rollout.rollout_id}/explanation")
    assert [call["reason"] for call in both["calls"]] == ["superseded_attempt", "unfinished"]
    path = f"/rollouts/{rollout.rollout_id}/explanation?attempt_id={rollout.attempt.attempt_id}"
    assert [call["call_id"] for call in (await page.get(path))["calls"]] == ["c1"]


# --- tree ------------------------------------------------------------------------------------------------------------


def failed_try(id: str, number: int, client: str) -> list[Span]:
    """A call that got no answer and named a span of its client."""
    request, raw = gateway_call(id, number, [], [], state="upstream_error", start=1.1)
    return [request, with_attributes(raw, {"agentlightning.call.client_span": f"{'t' * 32}-{client}"})]


async def test_the_gateways_record_stands_below_the_client_that_made_the_call(page: Page) -> None:
    spans = [
        span("root", "agent", None, 0.0, 9.0, 1),
        chat("seen", "root", 1.0, 2.0, response_id="reply", sequence_id=2),
        *gateway_call("c1", 3, [1], [2], response_id="reply", start=1.2),
        *failed_try("c0", 3, "seen"),
        *failed_try("c2", 3, "root"),
        reward("r", "root", 8.0, 0.5, sequence_id=4),
        span("orphan", "tool", "never-stored", 3.0, None, 5, status="ERROR"),
    ]
    rollout = await page.played(spans)
    tree = await page.get(f"/rollouts/{rollout.rollout_id}/attempts/latest/tree")
    names = {node["span_id"]: [child["span_id"] for child in node["children"]] for node in walk(tree["roots"])}
    assert set(names["seen"]) == {"req-c0", "req-c1"}
    assert names["req-c1"] == ["raw-c1"]
    assert {"seen", "r", "req-c2"} <= set(names["root"])
    nodes = {node["span_id"]: node for node in walk(tree["roots"])}
    assert nodes["r"]["reward"] == 0.5
    assert (nodes["orphan"]["status_code"], nodes["orphan"]["end_time"]) == ("ERROR", None)


async def test_spans_that_are_below_one_another_are_still_shown(page: Page) -> None:
    rollout = await page.played([span("a", "a", "b", 0.0, 1.0, 1), span("b", "b", "a", 0.0, 1.0, 2)])
    tree = await page.get(f"/rollouts/{rollout.rollout_id}/attempts/latest/tree")
    assert {node["span_id"] for node in walk(tree["roots"])} >= {"a", "b"} or tree["problems"]


async def test_a_chain_of_thousands_of_spans_is_told_to_a_bounded_depth(page: Page) -> None:
    chain = [span(f"s{n}", "step", f"s{n - 1}" if n else None, float(n), n + 1.0, n + 1) for n in range(5000)]
    rollout = await page.played(chain)
    tree = await page.get(f"/rollouts/{rollout.rollout_id}/attempts/latest/tree")
    assert len(walk(tree["roots"])) == 5000
    assert any("levels deep" in problem for problem in tree["problems"])


@pytest.mark.parametrize("path", ["tree", "conversation"])
async def test_the_spans_of_an_attempt_are_read_once(page: Page, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = await page.played([span("root", "agent", None, 0.0, 9.0, 1)])
    read, ids = page.store.query_spans, list[str]()

    async def counted(rollout_id: str, *args: Any, **options: Any) -> Any:
        ids.append(rollout_id)
        return await read(rollout_id, *args, **options)

    monkeypatch.setattr(page.store, "query_spans", counted)
    await page.get(f"/rollouts/{rollout.rollout_id}/attempts/latest/{path}")
    assert ids == [rollout.rollout_id]


def walk(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for node in nodes for each in (node, *walk(node["children"]))]


# --- conversation ----------------------------------------------------------------------------------------------------


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_a_message_is_shown_where_it_was_first_said(page: Page) -> None:
    first = [{"role": "system", "content": "be brief"}, user("hello")]
    then = [*first, {"role": "assistant", "content": "hi"}, user("more")]
    other = [*first, {"role": "assistant", "content": "hi"}, user("something else")]
    rollout = await page.played(
        [
            *spoken_call("c1", 1, [1], [2], first, "hi"),
            *spoken_call("c2", 2, [1, 2, 3], [4], then, "no"),
            *spoken_call("c3", 3, [1, 2, 5], [6], other, "yes"),
            *spoken_call("c4", 4, [9], [6], [user("quite another agent")], "yes"),
            reward("r", None, 9.0, 1.0, sequence_id=5),
        ]
    )
    calls = await page.conversation(rollout)
    texts = [[part["text"] for message in call["messages_new"] for part in message["content"]] for call in calls]
    assert texts == [["be brief", "hello"], ["more"], ["something else"], ["quite another agent"]]
    assert [call["branches_from"] for call in calls] == [None, None, 1, None]
    assert [call["reply"][0]["content"][0]["text"] for call in calls] == ["hi", "no", "yes", "yes"]
    assert [call["weight_version"] for call in calls] == [7] * 4
    assert [(call["new_row"], call["why"]) for call in calls[:2]] == [(True, "first_call"), (False, None)]


async def test_a_message_of_a_long_conversation_is_read_once_and_not_once_for_each_later_call(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, normalise = list[str](), conversation.line_of

    def counted(message: Mapping[str, object]) -> Line:
        read.append(str(message.get("content")))
        return normalise(message)

    monkeypatch.setattr(conversation, "line_of", counted)
    messages, turns = [user("begin")], 60
    spans = list[Span]()
    for turn in range(turns):
        spans += spoken_call(f"c{turn}", turn + 1, [turn], [1], messages, f"answer {turn}")
        messages = [*messages, {"role": "assistant", "content": f"answer {turn}"}, user(f"result {turn}")]
    calls = await page.conversation(await page.played(spans))
    assert [len(call["messages_new"]) for call in calls] == [1] * turns
    assert len(read) <= 4 * turns


async def test_the_first_calls_of_a_long_attempt_are_told_without_reading_the_others(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = [s for n in range(9) for s in spoken_call(f"c{n}", n + 1, [n], [1], [user(f"say {n}")], f"{n}")]
    rollout = await page.played([*spans, reward("r", None, 9.0, 1.0, sequence_id=20)])
    path = f"/rollouts/{rollout.rollout_id}/attempts/latest/conversation"
    whole = await page.get(path)
    read, limits = page.store.query_spans, list[int]()

    async def counted(rollout_id: str, *args: Any, **options: Any) -> Any:
        limits.append(options.get("limit", -1))
        return await read(rollout_id, *args, **options)

    monkeypatch.setattr(page.store, "query_spans", counted)
    begun = await page.get(f"{path}?limit=3")
    assert (begun["whole"], whole["whole"], limits) == (False, True, [10])
    untold = {"new_row": False, "why": None}
    assert begun["calls"] == [{**call, **untold} for call in whole["calls"][:3]]
    assert await page.get(f"{path}?limit=9") == whole
    assert "from 0 to 1000" in str(await page.get(f"{path}?limit=1001", status=400))


async def test_tools_reasoning_and_images_keep_their_form_and_no_image_its_bytes(page: Page) -> None:
    picture = b"not quite a picture"
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    parts = f'[{{"type": "text", "text": "what is it?"}}, {{"type": "image_url", "image_url": {{"url": "{url}"}}}}]'
    request, record = gateway_call("c1", 1, [1], [2])
    words: dict[str, Any] = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": parts}
    words |= {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.reasoning_content": "let me look"}
    words |= {"gen_ai.completion.0.tool_calls.0.id": "t1", "gen_ai.completion.0.tool_calls.0.name": "look"}
    words |= {"gen_ai.completion.0.tool_calls.0.arguments": '{"at": "it"}'}
    rollout = await page.played([with_attributes(request, words), record])
    [call] = await page.conversation(rollout)
    [message] = call["messages_new"]
    assert [part["type"] for part in message["content"]] == ["text", "image"]
    shown = message["content"][1]
    assert (shown["sha256"], shown["bytes"]) == (hashlib.sha256(picture).hexdigest(), len(picture))
    assert (shown["media_type"], shown["text"]) == ("image/png", None)
    [reply] = call["reply"]
    assert reply["content"] == [
        {"type": "reasoning", "text": "let me look", "sha256": None, "bytes": None, "media_type": None}
    ]
    assert reply["tool_calls"] == [{"id": "t1", "name": "look", "arguments": '{"at": "it"}'}]


async def test_late_cut_off_and_failed_calls_stand_in_their_place(page: Page) -> None:
    cut = gateway_call("c1", 1, [1], [2])
    cut[1] = with_attributes(cut[1], {"agentlightning.call.finish_reason": "length"})
    rollout = await page.played([*cut, *gateway_call("c2", 2, [1], [], state="refused")])
    place = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    again = await page.store.start_attempt(rollout.rollout_id)
    late = [each.model_copy(update=place) for each in gateway_call("c3", 3, [1], [2])]
    await page.store.add_many_spans(late)
    calls = await page.conversation(rollout)
    assert [(c["cut_off"], c["late"], c["state"]) for c in calls] == [
        (True, False, "ok"),
        (False, False, "refused"),
        (False, True, "ok"),
    ]
    assert calls[1]["reply"] == []
    again_path = f"/rollouts/{rollout.rollout_id}/attempts/{again.attempt.attempt_id}/conversation"
    assert await page.get(again_path) == {"calls": [], "shortened": 0, "whole": True}


async def test_a_text_of_megabytes_is_cut_and_hostile_text_stays_text(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "MOST_TEXT", 1000)
    hostile = "<script>alert(1)</script>\x00\u202e" + "x" * 5000
    rollout = await page.played(spoken_call("c1", 1, [1], [2], [user(hostile)], "ok"))
    answer = await page.get(f"/rollouts/{rollout.rollout_id}/attempts/latest/conversation")
    text = answer["calls"][0]["messages_new"][0]["content"][0]["text"]
    assert text.startswith("<script>alert(1)</script>")
    assert f"({len(hostile)} characters" in text
    assert answer["shortened"] == 1


# --- comparison ------------------------------------------------------------------------------------------------------


def evaluation(step: int, name: str, rewards: list[float | None], tasks: Sequence[str]) -> RunRecord:
    ids = [f"ro-{name}-{step}-{task}" for task in tasks]
    return RunRecord(
        kind="evaluation", step=step, name=name, data={"rewards": rewards, "tasks": list(tasks), "rollout_ids": ids}
    )


async def test_two_steps_are_compared_on_the_evaluation_that_both_have(page: Page) -> None:
    await page.store.start_run("run", algorithm="GRPO")
    tasks = [f"{n:016x}" for n in range(12)]
    records = [
        evaluation(0, "held_out_greedy", [0.0] * 12, tasks),
        evaluation(0, "held_out_sampled", [0.0] * 11 + [1.0], tasks),
        evaluation(4, "held_out_sampled", [1.0] * 10 + [0.0, None], tasks),
    ]
    await page.store.add_run_records("run", records)
    diff = await page.get("/comparison?before=run:0&after=run:4&limit=3")
    assert diff["before"].endswith("step 0, held_out_sampled")
    assert (diff["tasks"], diff["gained"], diff["lost"], diff["unchanged"], diff["total"]) == (11, 10, 0, 1, 11)
    assert (diff["verdict"], diff["test"]) == ("better", "exact sign test")
    assert diff["p_value"] == pytest.approx(2 / 2**10)
    assert diff["difference"] == pytest.approx(10 / 11)
    assert [(pair["before"], pair["after"]) for pair in diff["pairs"]] == [(0.0, 1.0)] * 3
    assert diff["pairs"][0]["after_rollout_id"].startswith("ro-held_out_sampled-4-")
    last = await page.get("/comparison?before=run:0&after=run:4&limit=3&offset=10")
    assert [(pair["before"], pair["after"]) for pair in last["pairs"]] == [(0.0, 0.0)]


async def test_two_versions_of_a_prompt_are_compared_by_the_rollouts_that_used_them(page: Page) -> None:
    first = await page.store.add_resources({"p": PromptTemplate(template="a {x}", engine="f-string")})
    for version, rewards in ((1, (0.0, 0.0, 0.5, 0.5)), (2, (1.0, 1.0, 0.0, 0.5))):
        if version == 2:
            await page.store.update_resources(
                first.resources_id, {"p": PromptTemplate(template="b {x}", engine="f-string")}
            )
        for task, value in enumerate(rewards):
            rollout = await page.store.start_rollout({"task": task}, resources_id=first.resources_id)
            assert rollout.resources_version == version
            place = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
            await page.store.add_span(reward("r", None, 1.0, value).model_copy(update=place))
            await page.store.update_attempt(*place.values(), status="succeeded", outcome="scored")
    sides = f"before=resources:{first.resources_id}@1&after=resources:{first.resources_id}@2"
    comparison = await page.get(f"/comparison?{sides}")
    assert (comparison["tasks"], comparison["gained"], comparison["lost"], comparison["unchanged"]) == (4, 2, 1, 1)
    assert (comparison["before_mean"], comparison["after_mean"]) == (0.25, 0.625)
    assert comparison["after"] == f"{first.resources_id} version 2"


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("before=run", 400, "after="),
        ("before=run:x&after=run", 400, "cannot be compared. Expected RUN"),
        ("before=resources:a&after=run", 400, "resources:ID@VERSION"),
        ("before=none&after=run", 404, "no run 'none'"),
        ("before=run:3&after=run:0", 404, "Steps with evaluations: 0, 4"),
        ("before=resources:none@1&after=run", 404, "no version 1"),
        ("before=run:0&after=other:0", 400, "no task in common"),
        ("before=run:0&after=run:4&limit=-1", 400, "limit must be"),
        ("before=run:0&after=run:4&offset=x", 400, "offset must be"),
        ("before=run:0&after=run:4&limit=000000000000999999", 400, "limit must be"),
        (f"before=run:0&after=run:4&limit={'9' * 5000}", 400, "limit must be"),
        (f"before={quote('<b>' * 100)}&after=run", 404, "<b><b>"),
    ],
)
async def test_a_comparison_that_cannot_be_made_says_why(page: Page, query: str, status: int, message: str) -> None:
    for run in ("run", "other"):
        await page.store.start_run(run, algorithm="GRPO")
        records = [evaluation(step, "held_out", [0.0, 1.0], [f"{run}-1", f"{run}-2"]) for step in (0, 4)]
        await page.store.add_run_records(run, records)
    assert message in (await page.get(f"/comparison?{query}", status))["detail"]


# --- the rest --------------------------------------------------------------------------------------------------------


async def test_what_is_not_there_is_told_by_its_name(page: Page) -> None:
    rollout = await page.played([])
    waiting = await page.store.enqueue_rollout({"question": "?"})
    for path, status, message in (
        ("/rollouts/ro-none/explanation", 404, "'ro-none'"),
        (f"/rollouts/{rollout.rollout_id}/explanation?attempt_id=at-none", 404, "'at-none'"),
        (f"/rollouts/{rollout.rollout_id}/attempts/at-none/tree", 404, rollout.attempt.attempt_id),
        (f"/rollouts/{waiting.rollout_id}/attempts/latest/conversation", 400, "it has not been claimed"),
    ):
        assert message in (await page.get(path, status))["detail"]


async def test_the_server_says_what_it_is(page: Page) -> None:
    facts = await page.get("/server")
    assert (facts["backend"], facts["persistent"]) == ("memory", False)
    assert facts["started"] <= facts["now"]
    assert facts["statistics"]["total_rollouts"] == 0
