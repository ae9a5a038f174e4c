from agentlightning.trackers.mlflow_tracker import MLflowTracker as MLflowTracker
from agentlightning.trackers.swanlab_tracker import SwanLabTracker as SwanLabTracker
from agentlightning.trackers.tensorboard_tracker import TensorBoardTracker as TensorBoardTracker
from agentlightning.trackers.tracker import RunEnding as RunEnding, TrackedRun as TrackedRun, Tracker as Tracker
from agentlightning.trackers.wandb_tracker import WandbTracker as WandbTracker
