"""Resources: publish versions, read by id or as the latest of a run, delete with the run."""

from __future__ import annotations

from typing import cast

from agentlightning.store.rules.idempotency import Call, recall_row, remember_row
from agentlightning.store.rules.tx import ResourcesRow, TextRow, Tx
from agentlightning.store.rules.values import evolve
from agentlightning.types import NamedResources, ResourcesUpdate


def publish(
    tx: Tx, now: float, resources_id: str, token: str | None, resources: NamedResources, run_id: str | None
) -> ResourcesUpdate:
    """Add the next version of a set of resources. It becomes the latest set of its run."""
    newest = cast("ResourcesRow | None", tx.get("resources", resources_id))
    call = None
    if token is not None:
        arguments = {"resources_id": resources_id, "resources": resources, "run_id": run_id}
        call = Call.of("update_resources", token, arguments)
        before = recall_row(tx, call, "update_resources")
        published = newest
        if before is not None:  # it names the version, which is not there if the first copy was cut off
            version = tx.get("resources_version", f"{resources_id}\n{before.answer}")
            published = cast("ResourcesRow | None", version)
        if published is not None and published.token == token:
            return published.update
    update = ResourcesUpdate(
        resources_id=resources_id,
        create_time=newest.update.create_time if newest else now,
        update_time=now,
        version=newest.update.version + 1 if newest else 1,
        resources=resources,
        run_id=run_id if run_id is not None or newest is None else newest.update.run_id,
    )
    row = ResourcesRow(update, token)
    remember_row(tx, call, now, str(update.version))
    tx.put("resources", resources_id, row)
    tx.put("resources_version", f"{resources_id}\n{update.version}", row)
    tx.put("latest_resources", _run_key(update.run_id), TextRow(resources_id))
    return update


def take_version(tx: Tx, update: ResourcesUpdate) -> bool | None:
    """Import a version from another store; return True if it is new, False if it exists, None if the store has a
    different version with this number. It becomes the latest of its run if no later one exists; a set keeps its run."""
    key = f"{update.resources_id}\n{update.version}"
    there, of = tx.get("resources_version", key), resources_by_id(tx, update.resources_id, None)
    if of is not None:
        if of.create_time != update.create_time:
            return None
        update = evolve(update, run_id=of.run_id)
    if there is not None:
        return False if cast("ResourcesRow", there).update == update else None
    row, run_key = ResourcesRow(update), _run_key(update.run_id)
    tx.put("resources_version", key, row)
    if of is None or of.version < update.version:
        tx.put("resources", update.resources_id, row)
    latest = latest_resources(tx, update.run_id) if tx.get("latest_resources", run_key) is not None else None
    if latest is None or latest.update_time < update.update_time:
        tx.put("latest_resources", run_key, TextRow(update.resources_id))
    return True


def resources_by_id(tx: Tx, resources_id: str, version: int | None) -> ResourcesUpdate | None:
    """Return one version of a set of resources, the newest by default."""
    if version is None:
        row = tx.get("resources", resources_id)
    else:
        row = tx.get("resources_version", f"{resources_id}\n{version}")
    return cast("ResourcesRow", row).update if row is not None else None


def latest_resources(tx: Tx, run_id: str | None) -> ResourcesUpdate | None:
    """Return the latest resources of the run; if it has none, the latest resources without a run."""
    pointer = tx.get("latest_resources", _run_key(run_id))
    if pointer is None and run_id is not None:
        pointer = tx.get("latest_resources", _run_key(None))
    return resources_by_id(tx, cast("TextRow", pointer).value, None) if pointer is not None else None


def forget_resources(tx: Tx, now: float, keep_seconds: float) -> None:
    """Delete resources of runs that are not kept and have no rollouts, unless they were published recently."""
    empty: dict[str, bool] = {}
    for resources_id, row in tx.scan("resources"):
        update = cast("ResourcesRow", row).update
        run_id = update.run_id
        if run_id is None or now - update.update_time <= keep_seconds:
            continue
        if run_id not in empty:
            empty[run_id] = tx.counts((run_id,)).rollouts == 0 and tx.get("run", run_id) is None
        if empty[run_id]:
            tx.drop("resources", resources_id)
            for version in range(1, update.version + 1):
                tx.drop("resources_version", f"{resources_id}\n{version}")
            pointer = tx.get("latest_resources", _run_key(run_id))
            if pointer is not None and cast("TextRow", pointer).value == resources_id:
                tx.drop("latest_resources", _run_key(run_id))


def _run_key(run_id: str | None) -> str:
    return "" if run_id is None else f"run {run_id}"
