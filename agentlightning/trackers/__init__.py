"""Experiment trackers: what a run records, told to TensorBoard, Weights & Biases, MLflow, SwanLab, or one of your own.

`Trainer(trackers=[...])` takes them. `tracker.py` says what a tracker is told; `feed.py` keeps one that is slow or
broken from the run. What each needs: `pip install 'agl-framework[tensorboard]'`, `[wandb]`, `[mlflow]`, `[swanlab]`.
"""

from agentlightning.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
