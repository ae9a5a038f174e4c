"""A provider's key reaches no agent, span or file, in however many pieces its server says it; else nothing changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.llm_proxy.upstream.provider_keys import HIDDEN, KeyWatch, Secrets
from tests.llm_proxy.harness import REQUESTS, GatewayHarness
from tests.stubs.faulty_engine import CHUNKED, FaultyEngine, Request, chunked, whole
from tests.stubs.model_replies import chat_frames, chat_reply, message_frames, response_frames, text_frames

Json = dict[str, Any]
KEY = "sk-provider/planted+0123456789"
LONG = "sk-provider/planted"
"""No part of the key this long may be seen."""


def content(frames: list[bytes]) -> str:
    """Return the text that an agent puts together of chat frames."""
    chunks = [json.loads(frame[6:]) for frame in frames if frame.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def frame(index: int = 0, **delta: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": index, "delta": delta}]}).encode() + b"\n\n"


def watched(frames: list[bytes]) -> list[bytes]:
    watch = KeyWatch(Secrets([KEY]))
    shown = [frame for raw in frames for frame in watch.feed(raw)]
    return [*shown, *watch.end()]


@pytest.mark.parametrize("first", range(len(KEY) + 1))
def test_a_key_in_two_frames_is_hidden_wherever_it_is_cut(first: int) -> None:
    frames = [frame(content="key: " + KEY[:first]), frame(content=KEY[first:] + ", yes"), frame(content=".")]
    shown = watched(frames)
    assert content(shown) == f"key: {HIDDEN}, yes."
    assert shown[-1] == frames[-1]


@given(
    st.lists(st.sampled_from(["", "a", "s", "sk", "sk-", "sk-p", KEY, KEY[:-1], KEY[3:], "\u00fc", " "]), max_size=12),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_whatever_a_stream_says_the_key_is_not_in_it_and_the_rest_is(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    frames = [frame(content=piece) for piece in pieces]
    shown = watched(frames)
    visible = content(shown)
    assert KEY not in visible
    if KEY not in text and not any(text.endswith(KEY[:n]) for n in range(8, len(KEY))):
        assert shown == frames
    elif KEY in text and not any(text.endswith(KEY[:n]) for n in range(8, len(KEY))):
        assert visible == text.replace(KEY, HIDDEN)


def test_only_a_frame_that_may_begin_a_key_waits_for_the_next() -> None:
    watch = KeyWatch(Secrets([KEY]))
    assert len(watch.feed(frame(role="assistant", content=""))) == 1
    assert len(watch.feed(frame(content="Yes"))) == 0  # it ends with an s, as the key begins
    assert len(watch.feed(frame(content="terday"))) == 2
    assert len(watch.feed(frame(reasoning_content="thus"))) == 0
    assert len(watch.feed(frame(content="and then"))) == 2  # another text goes on, and one letter tells nothing
    assert len(watch.feed(frame(content=LONG))) == 0
    assert len(watch.feed(frame(reasoning_content="x"))) == 0
    assert len(watch.feed(b": still here\n\n")) == 0
    assert len(watch.feed(frame(content="x"))) == 4


def test_choices_are_followed_each_for_itself() -> None:
    frames = [frame(0, content=KEY[:9]), frame(1, content="hello"), frame(0, content=KEY[9:]), frame(1, content=".")]
    shown = watched(frames)
    assert content(shown) == f"{HIDDEN}hello." or content(shown) == f"hello{HIDDEN}."
    assert [shown[1], shown[3]] == [frames[1], frames[3]]


QUOTED = 'sk-"quoted"\\0123456789'
WITHIN = ("in JSON in JSON", QUOTED)
ESCAPED: dict[str, Callable[[str], str]] = {
    "as it is": lambda key: json.dumps(f"it is {key}."),
    "letters as numbers": lambda key: '"it is ' + "".join(f"\\u{ord(sign):04x}" for sign in key) + '."',
    "one letter as a number": lambda key: f'"it is \\u0073{key[1:]}."',
    "slashes escaped": lambda key: '"it is ' + key.replace("/", "\\/") + '."',
    "in JSON in JSON": lambda key: json.dumps(json.dumps({"key": key})),
    "for an address": lambda key: json.dumps("http://x/?k=" + key.replace("/", "%2F").replace("+", "%2B")),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("case", "key"), [*((case, KEY) for case in ESCAPED), *((case, QUOTED) for case in list(ESCAPED)[:2]), WITHIN]
)
def test_the_key_is_found_however_it_is_written(case: str, key: str, streamed: bool) -> None:
    body = b'{"choices": [{"index": 0, "delta": {"content": %s}}]}' % ESCAPED[case](key).encode()
    if streamed:
        watch = KeyWatch(Secrets([key]))
        shown = b"".join([*watch.feed(b"data: " + body + b"\n\n"), *watch.end()])
        assert watch.hid_key
        text = content([shown])
    else:
        clean, has_key = Secrets([key]).hide(body)
        assert has_key
        text = json.loads(clean)["choices"][0]["delta"]["content"]
    assert HIDDEN in text
    assert key not in text
    assert json.dumps(key)[1:-1] not in text


def test_placeholders_are_words_like_others() -> None:
    for key in ("EMPTY", "dummy", "none", "", None):
        assert Secrets([key]).hide(b'{"content": "EMPTY dummy none"}') == (b'{"content": "EMPTY dummy none"}', False)


def chunk(piece: str, place: Callable[[str], Json]) -> bytes:
    """Return a chat frame that says a piece at some place."""
    chat: Json = {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [{"index": 0, "delta": {}}]}
    return b"data: " + json.dumps({**chat, **place(piece)}).encode() + b"\n\n"


def in_choice(**fields: Any) -> Json:
    return {"choices": [{"index": 0, "delta": {"content": "x"}, **fields}]}


TOGETHER: dict[str, Callable[[str], Json]] = {
    "content": lambda p: in_choice(delta={"content": p}),
    "thought": lambda p: in_choice(delta={"reasoning_content": p}),
    "parts of a delta": lambda p: in_choice(delta={"content": [{"type": "text", "text": p}]}),
    "arguments": lambda p: in_choice(delta={"tool_calls": [{"index": 0, "function": {"arguments": p}}]}),
    "text of a completion": lambda p: {"choices": [{"index": 0, "text": p}]},
    "delta of the frame": lambda p: {"delta": p, "choices": []},
    "delta of a block": lambda p: {"delta": {"type": "text_delta", "text": p}, "index": 0, "choices": []},
}
"""Texts that an agent puts together."""
WHOLE: dict[str, Callable[[str], Json]] = {
    "role": lambda p: in_choice(delta={"role": p}),
    "tool call id": lambda p: in_choice(delta={"tool_calls": [{"index": 0, "id": p}]}),
    "message": lambda p: in_choice(message={"content": p}),
    "tokens": lambda p: in_choice(logprobs={"content": [{"token": p, "logprob": -1.0}]}),
    "finish reason": lambda p: in_choice(finish_reason=p),
    "model": lambda p: {"model": p},
    "object": lambda p: {"object": p},
    "error": lambda p: {"error": {"message": p}},
}
"""Values that stand for themselves."""


def joined(frames: list[bytes]) -> list[str]:
    """Return what the frames say, joined for each field, by its names."""
    texts: dict[tuple[str, ...], str] = {}

    def walk(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, str):
            texts[path] = texts.get(path, "") + value
        if isinstance(value, dict):
            for name, inner in cast(Json, value).items():
                walk(inner, (*path, name))
        if isinstance(value, list):
            for inner in cast("list[Any]", value):
                walk(inner, path)

    for data in b"".join(frames).split(b"\n"):
        if data.startswith(b"data: {"):
            walk(json.loads(data[6:]), ())
    return list(texts.values())


@pytest.mark.parametrize("size", [1, 3, 7, 11, 29])
@pytest.mark.parametrize("place", TOGETHER)
def test_a_key_in_pieces_is_hidden_in_whatever_text_it_comes(place: str, size: int) -> None:
    pieces = [KEY[at : at + size] for at in range(0, len(KEY), size)]
    shown = watched([chunk(piece, TOGETHER[place]) for piece in pieces] + [b"data: [DONE]\n\n"])
    assert len(shown) == len(pieces) + 1
    assert not [text for text in joined(shown) if KEY in text.replace("x", "")]


@pytest.mark.parametrize("place", WHOLE)
def test_a_value_that_stands_for_itself_delays_nothing_and_hides_a_whole_key(place: str) -> None:
    watch = KeyWatch(Secrets([KEY]))
    for end in ("s", "sk", "sk-", LONG, "s"):
        raw = chunk("value-" + end, WHOLE[place])
        assert watch.feed(raw) == [raw]
    assert watch.end() == []
    assert not watch.hid_key
    assert KEY.encode() not in b"".join(watched([chunk(KEY, WHOLE[place])]))


def test_a_text_that_waits_is_not_let_go_with_another_in_its_frame() -> None:
    shown = watched(
        [frame(content=LONG, reasoning_content="s"), frame(content=""), frame(content=KEY[len(LONG) :]), frame()]
    )
    assert content(shown) == HIDDEN


# --- through the gateway ------------------------------------------------------------------------------------------

TOKENS: Json = {"logprobs": True, "return_token_ids": True}
ROUTES: dict[str, tuple[str, Json]] = {
    **{route: (route, REQUESTS[route]) for route in ("chat/completions", "completions", "responses", "messages")},
    "chat, with tokens shown": ("chat/completions", REQUESTS["chat/completions"] | TOKENS),
    "native responses": ("responses", REQUESTS["responses"]),
    "native messages": ("messages", REQUESTS["messages"]),
}


def tells(size: int) -> Callable[[Request], Any]:
    """Return a way that says the key, `size` characters a frame."""

    async def way(request: Request) -> None:
        text = f"the key is {KEY} indeed"
        if not request.streamed:
            await request.send(whole(200, json.dumps(request.reply(text)).encode()))
            return
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        marks = [f" m{number:04}" for number in range(len(pieces))]  # the stub gives each a frame
        frames = request.frames("".join(marks)[1:])
        for mark, piece in zip([marks[0][1:], *marks[1:]], pieces, strict=True):
            frames = [frame.replace(mark.encode(), piece.encode()) for frame in frames]
        await request.send(CHUNKED + chunked(frames))

    return way


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("case", ROUTES)
async def test_no_agent_span_or_file_has_the_key(case: str, streamed: bool, tmp_path: Path) -> None:
    route, body = ROUTES[case]
    native = {"dialects": ["messages", "responses"]} if case.startswith("native") else {}
    sizes = (1, 2, 5, 11, 29, 60)
    with FaultyEngine({f"m{size}": tells(size) for size in sizes}) as engine:
        entries = [engine.entry(f"m{size}", api_key=KEY, **native) for size in sizes]
        async with GatewayHarness(
            model_list=entries, record=tmp_path / "calls", journal=tmp_path / "journal"
        ) as harness:

            async def ask(size: int) -> str:
                request_body = {**body, "model": f"m{size}", "stream": streamed}
                async with harness.session.post(harness.url(f"/{route}"), json=request_body) as answer:
                    assert answer.status == 200
                    return await answer.text()

            got = await asyncio.gather(*(ask(size) for size in sizes))
            states = await harness.states()
            assert states == ["no_tokens"] * len(sizes)
            span_texts = [span.model_dump_json() for span in await harness.spans()]
            files = [(tmp_path / name).read_text() for name in ("calls", "journal")]
            texts = [str(span.attributes.get("gen_ai.completion.0.content")) for span in await harness.spans()]
    for text in [*got, *span_texts, *files]:
        assert KEY not in text
        assert LONG not in text
    assert sum(HIDDEN in text for text in texts) == len(sizes)


def test_streams_without_the_key_pass_byte_for_byte() -> None:
    body = REQUESTS["chat/completions"] | TOKENS | {"n": 2}
    words = "Yes, sk is skin; sk-prove it. Thus: " * 5
    frames = chat_frames(chat_reply(body, words + "s", "r-s", True), body)
    assert watched(frames) == frames
    from tests.stubs.model_replies import message_reply, response_reply, text_reply

    for make, cut in ((message_reply, message_frames), (response_reply, response_frames)):
        frames = cut(make({"model": "m"}, words, "r", True), {})
        assert watched(frames) == frames
    frames = text_frames(text_reply({"model": "m", "prompt": "x"}, words, "r", True), {})
    assert watched(frames) == frames
