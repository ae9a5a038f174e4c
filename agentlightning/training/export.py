"""A run as a folder of files: its settings, and its records as JSON Lines, a file for each kind."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from agentlightning.errors import BadRequestError
from agentlightning.private_files import open_private
from agentlightning.store.base import LightningStore
from agentlightning.store.read_operations import pages_of
from agentlightning.terminal import json_text
from agentlightning.training.records import clean_record, clean_run
from agentlightning.training.run_folder import check_writable
from agentlightning.types.runs import Run

_PAGE = 100
_FILE_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


async def export_run(store: LightningStore, run: Run, folder: Path) -> dict[str, int]:
    """Write a run into a folder that is empty or new, and return how many lines each file has.

    `run.json` holds the run with its settings and versions, `<kind>.jsonl` its records in the order of their steps, and
    `vocabulary-<id>.json` the text of each token id. Secrets are hidden once more.

    Raises:
        BadRequestError: the folder cannot be written, or has something in it.
    """
    if os.listdir(check_writable(folder)):
        raise BadRequestError(f"The folder {str(folder)!r} is not empty; choose another one")
    _write(folder / "run.json", clean_run(run).model_dump(mode="json"))
    lines, vocabularies = Counter[str](), set[str]()
    with ExitStack() as stack:
        files: dict[str, IO[str]] = {}
        async for page in pages_of(store.query_run_records, run_id=run.run_id, limit=_PAGE):
            for record in page:
                if record.kind not in files:
                    files[record.kind] = stack.enter_context(open_private(folder / f"{record.kind}.jsonl", "w"))
                line = json.dumps(clean_record(record).model_dump(mode="json"), ensure_ascii=False)
                files[record.kind].write(json_text(line) + "\n")
                lines[record.kind] += 1
                vocabularies |= {row["vocabulary"] for row in record.data.get("rows", ()) if row.get("vocabulary")}
    for name in sorted(vocabularies):
        tokens = await store.get_vocabulary(name) if _FILE_NAME.fullmatch(name) else None
        if tokens is not None:
            _write(folder / f"vocabulary-{name}.json", tokens)
    return dict(lines)


def _write(path: Path, data: object) -> None:
    with open_private(path, "w") as file:
        file.write(json_text(json.dumps(data, indent=2, ensure_ascii=False)) + "\n")
