"""The environment of VERL's processes, set before verl is imported: the platform that makes it run on a CPU."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

ON_CPU = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_USE_EXTERNAL_MODULES": "tests.training.external.verl.cpu_platform",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[4]),
}
if importlib.util.find_spec("verl") is not None:
    os.environ.update(ON_CPU)
