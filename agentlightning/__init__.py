"""Train any AI agent, with almost no change to the agent. `import agentlightning as agl`.

Names are imported on first use, so that the import is fast and a runner does not load a training stack.
"""

from agentlightning.base.lazy import attach_stub, explain_imports

_REMOVED: dict[str, str] = {
    "CollectionBasedLightningStore": "Implement a `Tx` and a `Backend` instead, see agentlightning/store/rules/tx.py.",
    "RedisLightningStore": "Write a subclass of agl.LightningStore, or use agl.SQLiteLightningStore.",
    "TrainerLegacy": "Use agl.Trainer: fit(agent, train_dataset=...) replaces the v0.1 methods.",
}

explain_imports(
    {
        "agentlightning.store.redis": "The module agentlightning.store.redis does not exist. "
        f"{_REMOVED['RedisLightningStore']} See docs/how-to/write-a-store.md."
    }
)

__getattr__, __dir__ = attach_stub(__name__, _REMOVED)
