"""Our core of GRPO beside TRL's `GRPOTrainer(tools=)`, at the same model, tasks, rollouts and steps: `make bench-trl`.

In an environment of its own; `ours.py` and `theirs.py` each run one seed in a process of its own.
"""
