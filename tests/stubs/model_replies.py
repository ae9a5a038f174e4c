"""Replies of the stub of a model server: whole ones and streams of each dialect, with deterministic tokens.

Written from the API references, not with the gateway's own code. A token is a word with the white space before it, so
texts come through a stream exactly.
"""

from __future__ import annotations

import json
import re
import zlib
from itertools import chain, zip_longest
from typing import Any

Json = dict[str, Any]
Answer = str | Json
_TEXTS = ("reasoning_content", "content", "refusal")
"""Fields of a chat message in the order in which the model makes them."""


def encode(text: str) -> list[int]:
    """Return the toy token ids of a text, one per word."""
    return [zlib.crc32(word.encode("utf-8", "replace")) % 30000 + 1 for word in text.split()]


def logprobs_of(token_ids: list[int]) -> list[float]:
    """Return the log-probabilities that the server reports, one per token."""
    return [-(index % 7 + 1) / 10 for index in range(len(token_ids))]


def words(text: str) -> list[str]:
    """Cut a text into one piece per token; together they are the text."""
    return re.findall(r"\s*\S+(?:\s+\Z)?|\A\s+\Z", text)


def said(message: Json) -> str:
    """Return all that the model wrote, as its tokens have it."""
    calls = message.get("tool_calls")
    parts = (*(message.get(name) for name in _TEXTS), json.dumps(calls) if calls else None)
    return " ".join(part for part in parts if part) or "null"


def _usage(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(request: Json, name: str, kind: str) -> Json:
    return {"id": name, "object": kind, "created": 1_700_000_000, "model": request["model"]}


# --- chat completions ------------------------------------------------------------------------------------------------


def chat_reply(request: Json, answer: Answer, name: str, tokens: bool) -> Json:
    """An answer is a text or a message, which may also hold `finish_reason` and `stop_reason`."""
    prompt = encode(" ".join(f"{m.get('role')} {m.get('content')}" for m in request["messages"]) + " assistant")
    choices = [_chat_choice(request, answer, index, tokens) for index in range(request.get("n") or 1)]
    spent = sum(len(encode(said(choice["message"]))) for choice in choices)
    reply = {**_head(request, name, "chat.completion"), "choices": choices, "usage": _usage(len(prompt), spent)}
    if tokens and request.get("return_token_ids"):
        reply["prompt_token_ids"] = prompt
    return reply


def _chat_choice(request: Json, answer: Answer, index: int, tokens: bool) -> Json:
    message: Json = {"role": "assistant", **(answer if isinstance(answer, dict) else {"content": answer})}
    if index:
        message["content"] = f"{message['content']} {index}"
    reason = message.pop("finish_reason", "tool_calls" if message.get("tool_calls") else "stop")
    choice: Json = {"index": index, "message": message, "logprobs": None, "finish_reason": reason}
    if "stop_reason" in message:
        choice["stop_reason"] = message.pop("stop_reason")
    token_ids = encode(said(message))
    if tokens and request.get("return_token_ids"):
        choice["token_ids"] = token_ids
    if tokens and request.get("logprobs"):
        pairs = zip(token_ids, logprobs_of(token_ids), strict=True)
        choice["logprobs"] = {"content": [{"token": str(t), "logprob": p, "top_logprobs": []} for t, p in pairs]}
    return choice


def chat_frames(reply: Json, request: Json) -> list[bytes]:
    """vLLM's spelling: prompt ids in the first frame, token ids in each; the choices take turns."""
    head = {"id": reply["id"], "object": "chat.completion.chunk", "created": reply["created"], "model": reply["model"]}
    turns = zip_longest(*(_chat_pieces(choice) for choice in reply["choices"]))
    chunks: list[Json] = [{**head, "choices": [piece]} for piece in chain.from_iterable(turns) if piece is not None]
    if "prompt_token_ids" in reply:
        chunks[0]["prompt_token_ids"] = reply["prompt_token_ids"]
    if (request.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], "usage": reply["usage"]})
    return [*(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"]


def _chat_pieces(choice: Json) -> list[Json]:
    message, index = choice["message"], choice["index"]
    ids, logprobs = list(choice.get("token_ids") or []), list((choice.get("logprobs") or {}).get("content") or [])

    def piece(delta: Json, tokens: int) -> Json:
        made: Json = {"index": index, "delta": delta, "finish_reason": None}
        if ids and tokens:
            made["token_ids"] = [ids.pop(0) for _ in range(tokens)]
        if logprobs and tokens:
            made["logprobs"] = {"content": [logprobs.pop(0) for _ in range(tokens)]}
        return made

    pieces = [piece({"role": "assistant", "content": ""}, 0)]
    for name in _TEXTS:
        pieces += [piece({name: word}, bool(word.strip())) for word in words(message.get(name) or "")]
    for number, call in enumerate(message.get("tool_calls") or []):
        start = {"index": number, "type": "function", "id": call["id"]}
        start["function"] = {**call["function"], "arguments": ""}
        pieces.append(piece({"tool_calls": [start]}, 0))
        arguments = call["function"]["arguments"]
        for part in (arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :]):
            pieces.append(piece({"tool_calls": [{"index": number, "function": {"arguments": part}}]}, 0))
    rest = piece({}, max(len(ids), len(logprobs)))
    if message.get("tool_calls"):  # its tokens come with the last piece of them
        pieces[-1] |= {name: rest[name] for name in ("token_ids", "logprobs") if name in rest}
        rest = piece({}, 0)
    last = {name: choice[name] for name in ("finish_reason", "stop_reason") if name in choice}
    return [*pieces, {**rest, **last}]


# --- text completions and embeddings ---------------------------------------------------------------------------------


def text_reply(request: Json, answer: Answer, name: str, tokens: bool) -> Json:
    content = request["prompt"]
    prompts = [content] if isinstance(content, str) or all(isinstance(token, int) for token in content) else content
    count = request.get("n") or 1
    choices: list[Json] = []
    for number, prompt in enumerate(prompts * count):
        text = str(answer) if number == 0 else f"{answer} {number}"
        token_ids = encode(text)
        choice: Json = {"index": number, "text": text, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        if tokens and request.get("return_token_ids"):
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = encode(prompt) if isinstance(prompt, str) else prompt
        if tokens and request.get("logprobs") is not None:
            shown = {"tokens": words(text), "token_logprobs": logprobs_of(token_ids)}
            top = [{word: value} for word, value in zip(shown["tokens"], shown["token_logprobs"], strict=True)]
            choice["logprobs"] = {**shown, "top_logprobs": top, "text_offset": [0] * len(token_ids)}
        choices.append(choice)
    spent = sum(len(encode(choice["text"])) for choice in choices)
    return {**_head(request, name, "text_completion"), "choices": choices, "usage": _usage(len(prompts), spent)}


def text_frames(reply: Json, request: Json) -> list[bytes]:
    head = {name: reply[name] for name in ("id", "object", "created", "model")}
    turns = zip_longest(*(_text_pieces(choice) for choice in reversed(reply["choices"])))
    chunks: list[Json] = [{**head, "choices": [piece]} for piece in chain.from_iterable(turns) if piece is not None]
    if (request.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], "usage": reply["usage"]})
    return [*(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"]


def _text_pieces(choice: Json) -> list[Json]:
    pieces: list[Json] = []
    logprobs = choice.get("logprobs")
    for place, word in enumerate(words(choice["text"])):
        piece: Json = {"index": choice["index"], "text": word, "logprobs": None, "finish_reason": None}
        if "token_ids" in choice:
            piece["token_ids"] = [choice["token_ids"][place]]
        if logprobs:
            piece["logprobs"] = {name: [values[place]] for name, values in logprobs.items()}
        pieces.append(piece)
    if "prompt_token_ids" in choice:
        pieces[0]["prompt_token_ids"] = choice["prompt_token_ids"]
    return [*pieces, {"index": choice["index"], "text": "", "logprobs": None, "finish_reason": choice["finish_reason"]}]


def embeddings_reply(request: Json, answer: Answer, name: str, tokens: bool) -> Json:
    value = request["input"]
    inputs = [value] if isinstance(value, str) else value
    data = [{"object": "embedding", "index": i, "embedding": [0.25, float(i)]} for i, _ in enumerate(inputs)]
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    return {"object": "list", "data": data, "model": request["model"], "usage": usage}


# --- Anthropic's messages, as their own server speaks them -----------------------------------------------------------


def message_reply(request: Json, answer: Answer, name: str, tokens: bool) -> Json:
    """An answer is a text, or fields of the message."""
    fields = answer if isinstance(answer, dict) else {"content": [{"type": "text", "text": answer}]}
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": request["model"],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 7, "output_tokens": 5, "cache_read_input_tokens": 2},
        **fields,
    }


def message_frames(reply: Json, request: Json) -> list[bytes]:
    begun = {**reply, "content": [], "stop_reason": None, "usage": {**reply["usage"], "output_tokens": 1}}
    events: list[tuple[str, Json]] = [("message_start", {"message": begun}), ("ping", {})]
    for index, block in enumerate(reply["content"]):
        kind = block["type"]
        empty = {**block, **({"text": ""} if kind == "text" else {"thinking": ""} if kind == "thinking" else {})}
        empty |= {"input": {}} if kind == "tool_use" else {}
        events.append(("content_block_start", {"index": index, "content_block": empty}))
        text = json.dumps(block["input"]) if kind == "tool_use" else block[kind]
        name = "input_json_delta" if kind == "tool_use" else f"{kind}_delta"
        field = "partial_json" if kind == "tool_use" else kind
        events += [("content_block_delta", {"index": index, "delta": {"type": name, field: w}}) for w in words(text)]
        events.append(("content_block_stop", {"index": index}))
    ended = {"stop_reason": reply["stop_reason"], "stop_sequence": reply["stop_sequence"]}
    events += [("message_delta", {"delta": ended, "usage": {"output_tokens": reply["usage"]["output_tokens"]}})]
    return [_event(kind, fields) for kind, fields in [*events, ("message_stop", {})]]


# --- OpenAI's responses, as their own server speaks them -------------------------------------------------------------


def response_reply(request: Json, answer: Answer, name: str, tokens: bool) -> Json:
    """An answer is a text, or fields of the response."""
    part = {"type": "output_text", "text": answer, "annotations": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": 1_700_000_000,
        "model": request["model"],
        "status": "completed",
        "output": [item],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 7,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 12,
        },
        **(answer if isinstance(answer, dict) else {}),
    }


def response_frames(reply: Json, request: Json) -> list[bytes]:
    (item,) = reply["output"]
    begun = {"response": {**reply, "status": "in_progress", "output": [], "usage": None}}
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    part = item["content"][0]
    events: list[tuple[str, Json]] = [
        ("response.created", begun),
        ("response.in_progress", begun),
        ("response.output_item.added", {"output_index": 0, "item": {**item, "content": []}}),
        ("response.content_part.added", {**place, "part": {**part, "text": ""}}),
        *(("response.output_text.delta", {**place, "delta": word, "logprobs": []}) for word in words(part["text"])),
        ("response.output_text.done", {**place, "text": part["text"], "logprobs": []}),
        ("response.content_part.done", {**place, "part": part}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": reply}),
    ]
    return [_event(kind, {"sequence_number": number, **fields}) for number, (kind, fields) in enumerate(events)]


def _event(kind: str, fields: Json) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


REPLIES = {
    "/v1/chat/completions": (chat_reply, chat_frames),
    "/v1/completions": (text_reply, text_frames),
    "/v1/embeddings": (embeddings_reply, None),
    "/v1/messages": (message_reply, message_frames),
    "/v1/responses": (response_reply, response_frames),
}
"""For each path: the function that makes a reply, and the one that cuts it into the frames of a stream."""
