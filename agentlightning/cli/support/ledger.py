"""What `agl runs ledger` shows: the endings of model calls, the tokens of a row, and whether all of it adds up."""

from __future__ import annotations

from typing import Any, cast

from agentlightning.cli.support.output import number, say, show_json, show_table
from agentlightning.errors import NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.store.cursors import pages_of
from agentlightning.training.ledger_records import LedgerEntry, check_ledger, numbers_of
from agentlightning.training.records import clean_record

_PAGE = 100
_CALLS = ("step", "rollout", "call", "ending", "row", "tokens", "advantage", "weights")
_FIGURES = (
    *("engine_logprobs", "trainer_logprobs", "entropy", "ratio", "clipped"),
    *("weight", "correction", "kl", "advantage"),
)


async def show_check(store: LightningStore, run_id: str, *, as_json: bool) -> int:
    """Check the ledger of a run, say what was found, and return the exit code."""
    found = await check_ledger(store, run_id)
    if as_json:
        show_json({"adds_up": found.adds_up, **vars(found)})
        return 0 if found.adds_up else 1
    excluded = ", ".join(f"{reason} {count}" for reason, count in found.excluded.most_common())
    say(
        f"{found.captured} model calls: {found.trained} trained ({found.trained_tokens} tokens), "
        f"{found.excluded.total()} excluded{f' ({excluded})' if excluded else ''}; "
        f"{found.evaluation_calls} more of evaluations; {found.rows} token rows"
    )
    if found.without_span:
        say(f"{found.without_span} recorded calls have no span any more")
    for line in found.wrong:
        say(f"wrong: {line}")
    say("the ledger adds up" if found.adds_up else f"the ledger does not add up: {found.wrong_count} faults")
    return 0 if found.adds_up else 1


async def show_calls(
    store: LightningStore, run_id: str, step: int | None, rollout: str | None, limit: int, offset: int, *, as_json: bool
) -> tuple[int, int]:
    """Show the calls of a page of rollouts, and return how many rollouts are on it and how many there are."""
    page = await store.query_run_records(
        run_id, kind_in=["ledger"], step_from=step, step_to=step, name=rollout, limit=limit, offset=offset
    )
    if as_json:
        show_json([{"step": record.step, **clean_record(record).data} for record in page])
        return len(page), page.total
    lines: list[tuple[str, ...]] = []
    for record in page:
        entry = cast(LedgerEntry, record.data)
        calls = entry.get("calls", [])
        if not calls:
            lines.append((str(record.step), record.name, "-", f"no call ({entry.get('verdict') or '-'})", *"----"))
        for call in calls:
            ending = "trained" if call["ending"] == "trained" else str(call["reason"])
            late = " (late)" if entry.get("late") else ""
            figures = (call["row"], call["tokens"] or None, call["advantage"], call["weight_version"])
            lines.append((str(record.step), record.name, call["call_id"], ending + late, *map(number, figures)))
    show_table(_CALLS, lines)
    return len(page), page.total


async def show_row(store: LightningStore, run_id: str, step: int, row: int, *, as_json: bool) -> int:
    """Show the tokens of a row with the numbers that the loss used; the call of each trained one.

    Raises:
        NotFoundError: the step recorded no such row.
    """
    rows: dict[int, tuple[LedgerEntry, dict[str, Any]]] = {}
    of_step: dict[str, Any] = {"run_id": run_id, "kind_in": ["ledger"], "step_from": step, "step_to": step}
    async for page in pages_of(store.query_run_records, **of_step, limit=_PAGE):
        for record in page:
            entry = cast(LedgerEntry, record.data)
            rows |= {each.get("row", -1): (entry, dict(each)) for each in entry.get("rows", ())}
        if row in rows:
            break
    if row not in rows:
        there = f"it has: {', '.join(map(str, sorted(rows)[:20]))}" if rows else "it has none (record_tokens)"
        raise NotFoundError(f"Step {step} of run {run_id!r} recorded no tokens of row {row}; {there}")
    entry, found = rows[row]
    numbers = numbers_of(cast(Any, found))
    texts: list[str] = await store.get_vocabulary(found.get("vocabulary") or "") or []
    calls = [call for call in entry.get("calls", ()) if call["row"] == row]
    owners: list[str] = [call["call_id"] for call in calls for _ in range(call["tokens"])]
    trained = -1
    lines: list[dict[str, Any]] = []
    for place, (token, mask) in enumerate(zip(numbers["tokens"], numbers["mask"], strict=True)):
        trained += mask
        figures = {n: numbers[n][trained] for n in _FIGURES if n in numbers} if mask else {}
        text: str | None = texts[int(token)] if 0 <= token < len(texts) else None
        call_id: str | None = owners[int(trained)] if mask and trained < len(owners) else None
        lines.append({"place": place, "token": token, "text": text, "call_id": call_id, **figures})
    if as_json:
        show_json({"step": step, "row": row, "rollout_id": entry.get("rollout_id"), "tokens": lines})
        return 0
    say(f"row {row} of step {step}: rollout {entry.get('rollout_id')}, reward {number(entry.get('reward'))}")
    shown = [name for name in _FIGURES if name in numbers]
    table = [
        (str(line["place"]), str(line["token"]), repr(line["text"]) if line["text"] is not None else "-",
         line["call_id"] or "-", *(number(line.get(name)) for name in shown))
        for line in lines
    ]  # fmt: skip
    show_table(("place", "token", "text", "call", *shown), table)
    return 0
