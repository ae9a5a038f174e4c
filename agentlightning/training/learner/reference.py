"""The reference of the KL penalty: the model as it was loaded.

Where adapters learn, it is the live model with its adapters switched off. Where all weights learn, it is a frozen copy,
which takes the memory of the weights once more.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel


class Reference:
    """Gives the reference of a model that learns; made before its first update."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._live: Any = model
        self._copy: Any = None
        if not hasattr(model, "disable_adapter"):
            self._copy = copy.deepcopy(model).requires_grad_(False).eval()

    @contextmanager
    def switched_on(self) -> Generator[PreTrainedModel]:
        """Give the model to compute with; within, the live model must not be used where it is the same one."""
        if self._copy is not None:
            yield self._copy
        else:
            with self._live.disable_adapter():
                yield self._live
