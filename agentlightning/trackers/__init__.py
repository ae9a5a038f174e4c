"""Experiment trackers: the records of a run in TensorBoard, Weights & Biases, MLflow, SwanLab, or your own tracker.

Pass them to `Trainer(trackers=[...])`. `tracker.py` has the protocol; `feed.py` isolates the run from a slow or broken
tracker. Packages: `pip install 'agl-framework[tensorboard]'`, `[wandb]`, `[mlflow]`, `[swanlab]`.
"""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
