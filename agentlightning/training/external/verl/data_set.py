"""What VERL's data loader hands out in the place of prompts: the places of a step's tasks. The run has the tasks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset


class PlacesOfSteps(Dataset[dict[str, Any]]):
    """One row for each task of each step, in order; `data.train_files` and `data.val_files` say `train:COUNT` or
    `val:COUNT`."""

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        told = data_files if isinstance(data_files, str) else data_files[0]
        self._part, _, count = str(told).partition(":")
        self._count = int(count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "agl_part": self._part,
            "index": index,
            "raw_prompt": [],
            "data_source": "agentlightning",
            "reward_model": {"ground_truth": ""},
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
        }
