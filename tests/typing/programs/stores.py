"""The store, from a program of a user's own."""

import asyncio

import agentlightning as agl


async def main() -> None:
    store = agl.InMemoryLightningStore()
    rollout = await store.start_rollout(input={"question": "1+1"}, mode="train")
    reveal_type(rollout)  # R: AttemptedRollout
    reveal_type(rollout.attempt)  # R: Attempt
    claimed = await store.dequeue_rollout(worker_id="w")
    reveal_type(claimed)  # R: AttemptedRollout | None
    print(claimed.rollout_id)  # E
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
    await store.update_attempt(rollout.rollout_id, "latest", status="done")  # E
    await store.query_spans(rollout.rollout_id, limit="10")  # E
    await store.enqueue_rollout({"question": "1+1"}, mode="training")  # E
    sqlite = agl.SQLiteLightningStore("run.db")
    reveal_type(await sqlite.query_resources())  # R: PaginatedResult[ResourcesUpdate]
    await sqlite.enqueue_rollout({"question": "1+1"}, priority="high")  # E
    await agl.PostgresLightningStore("postgresql://localhost/runs").add_span(rollout)  # E
    await agl.MongoLightningStore("mongodb://localhost", database=1)  # E
    page = await store.query_rollouts(status_in=["succeeded"], limit=10)
    reveal_type(page)  # R: PaginatedResult[AttemptedRollout | Rollout]
    for each in page:
        reveal_type(each)  # R: Rollout
    await store.enqueue_rollout()  # E
    client = agl.LightningStoreClient("http://localhost:4747")
    reveal_type(await client.get_rollout_by_id("r"))  # R: AttemptedRollout | Rollout | None
    await store.update_rollout(rollout_id="r", status="succeeded", configuration=None)  # E


asyncio.run(main())
