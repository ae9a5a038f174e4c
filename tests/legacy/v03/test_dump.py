"""JSON in files, in every form, in pieces of any size; what is no JSON is named with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import BadRequestError
from agentlightning.legacy.v03 import dump, open_source
from agentlightning.legacy.v03.source import Kind

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(['"]}', "\\", "{[", "\n,"])
_DOCUMENTS = st.lists(
    st.fixed_dictionaries({"rollout_id": _TEXTS, "n": st.lists(st.integers() | st.none() | _TEXTS, max_size=5)}),
    max_size=8,
)
_FORMS = {
    "list": lambda each: json.dumps(each),
    "indented": lambda each: json.dumps(each, indent=2),
    "no ASCII": lambda each: json.dumps(each, ensure_ascii=False),
    "page": lambda each: json.dumps({"items": each, "limit": -1, "offset": 0, "total": len(each)}),
    "lines": lambda each: "\n".join(json.dumps(one) for one in each),
    "lines with an end": lambda each: "".join(json.dumps(one) + "\r\n" for one in each),
    "with a mark": lambda each: "\ufeff" + json.dumps(each),
}


async def read(place: Path, kind: Kind = "rollouts") -> list[Any]:
    return [each async for each in open_source(str(place)).documents(kind)]


@pytest.mark.parametrize("form", _FORMS)
@given(documents=_DOCUMENTS, chunk=st.integers(1, 40))
def test_any_form_is_read_in_pieces_of_any_size(form: str, documents: list[Any], chunk: int) -> None:
    import asyncio
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dump, "_CHUNK", max(chunk, 16 if form == "page" else 4))
        (Path(folder) / "rollouts.json").write_bytes(_FORMS[form](documents).encode())
        assert asyncio.run(read(Path(folder))) == documents


async def test_several_files_of_a_kind_are_read_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "rollouts.json").write_text("[]")
    for number in (1, 2):
        (tmp_path / f"spans-{number}.jsonl").write_text(json.dumps({"n": number}))
    (tmp_path / "spanship.json").write_text("no kind of ours")
    assert await read(tmp_path, "spans") == [{"n": 1}, {"n": 2}]


async def test_without_a_list_of_attempts_the_one_in_each_rollout_is_taken(tmp_path: Path) -> None:
    (tmp_path / "rollouts.json").write_text(json.dumps([{"rollout_id": "a", "attempt": {"n": 1}}, {"rollout_id": "b"}]))
    assert await read(tmp_path, "attempts") == [{"n": 1}]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[{"a": 1}, {"b": ', "after item 1"),
        ('[{"a": 1}', "after item 1"),
        ('{"a": 1}\n{"b"', "after item 1"),
        ("[1]", "item 1 is a int; expected an object"),
        ("nothing", "after item 0"),
        ('[{"a": NaN} oops]', "after item 1"),
    ],
)
async def test_what_is_no_json_is_named_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "rollouts.json").write_text(text)
    with pytest.raises(BadRequestError, match=says):
        await read(tmp_path)


async def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "rollouts.json").write_bytes(b'[{"a": "\xff"}]')
    with pytest.raises(BadRequestError, match="not valid JSON after item 0"):
        await read(tmp_path)
