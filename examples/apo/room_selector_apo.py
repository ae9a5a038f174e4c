"""Tune a prompt with APO and with GEPA, and measure each on requests that the search has never seen."""

from __future__ import annotations

import argparse
from typing import Any

from room_selector import make_tasks, selects_room
from stand_in import llm, model_server

import agentlightning as agl

SEED = "Choose the smallest room that seats {people} people."


def resources() -> agl.NamedResources:
    """Return the resources at the start of the search."""
    return {"prompt": agl.PromptTemplate(template=SEED, engine="f-string"), "llm": llm("selector")}


def search(method: str) -> None:
    """Run the search; print the best prompt, and the reward before and after with 95 % intervals."""
    train, validation, held_out = make_tasks()
    critic = llm("critic")
    algorithm: Any
    if method == "apo":
        algorithm = agl.APO[Any](critic, beam_rounds=4, gradient_batch_size=4, val_batch_size=16)
    else:
        algorithm = agl.GEPA[Any](critic, max_metric_calls=400, reflection_minibatch_size=4)
    trainer = agl.Trainer(
        algorithm=algorithm,
        initial_resources=resources(),
        strategy="shm",
        runner={"concurrency": 16},
        progress="none",
    )
    before = trainer.evaluate(selects_room, held_out)
    trainer.fit(selects_room, train_dataset=train, val_dataset=validation)
    after = trainer.evaluate(selects_room, held_out, resources=trainer.result.best_resources)
    print(f"--- {method}: {trainer.result.rollouts} rollouts, {trainer.result.bill.calls} calls to the critic")
    print(trainer.result.best_prompt.template)
    for name, evaluation in (("before", before), ("after", after)):
        interval = evaluation.interval()
        assert interval is not None
        print(f"{name:6} {evaluation.mean_reward:.2f} [{interval.low:.2f}, {interval.high:.2f}]")
    print(before.compare(after))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=["apo", "gepa"], action="append")
    methods = parser.parse_args().method or ["apo", "gepa"]
    with model_server():
        for method in methods:
            search(method)


if __name__ == "__main__":
    main()
