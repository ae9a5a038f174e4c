"""Rollouts of the store for VERL's trainer on many GPUs; see `verl.py`."""

from agentlightning.algorithm.verl.verl import VERL as VERL
