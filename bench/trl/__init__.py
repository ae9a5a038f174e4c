"""Our core of GRPO beside TRL's `GRPOTrainer(tools=)`, at the same model, tasks, rollouts and steps: `make bench-trl`.

It needs a separate environment; `ours.py` and `theirs.py` each run one seed in a separate process.
"""
