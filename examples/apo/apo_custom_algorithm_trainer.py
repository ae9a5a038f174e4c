"""Algorithm and agent of `apo_custom_algorithm.py` in one program: the Trainer runs store, algorithm and runner.

python apo_custom_algorithm_trainer.py
"""

from __future__ import annotations

from apo_custom_algorithm import apo_algorithm, apo_rollout
from stand_in import model_server

from agentlightning import LightningStore, Trainer, setup_logging
from agentlightning.algorithm.decorator import algo


@algo
async def apo_algorithm_usable_in_trainer(*, store: LightningStore) -> str:
    """Run the same function as an algorithm of the Trainer, which passes it the store of the run."""
    return await apo_algorithm(store=store)


def main() -> None:
    setup_logging("WARNING")
    with model_server():
        trainer = Trainer(n_runners=1, algorithm=apo_algorithm_usable_in_trainer)
        trainer.fit(apo_rollout)


if __name__ == "__main__":
    main()
