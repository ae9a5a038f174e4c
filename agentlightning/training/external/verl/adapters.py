"""The trained model of a VERL run. VERL saves adapters under names that only PEFT reads; this module merges them."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

INDEX: Final = "model.safetensors.index.json"
_META: Final = "lora_train_meta.json"
"""VERL's file with `r` and `lora_alpha`, in the folder above the model."""
_PREFIX: Final = "base_model.model."
_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def copy_newest_model(checkpoints: Path, folder: Path) -> None:
    """Copy the model of VERL's newest checkpoint, if there is one, into a folder that transformers loads."""
    models = list(checkpoints.glob("global_step_*/actor/huggingface/*.safetensors"))
    if not models:
        return
    newest = max(models, key=lambda path: path.stat().st_mtime)
    shutil.copytree(newest.parent, folder, dirs_exist_ok=True)
    if (meta := newest.parents[1] / _META).exists():
        settings = json.loads(meta.read_text())
        merge_adapters(folder, rank=settings["r"], alpha=settings["lora_alpha"])


def merge_adapters(folder: Path, *, rank: int, alpha: float) -> None:
    """Replace the weights in a folder by W + (alpha / r) B A (LoRA, arXiv:2106.09685, section 4.1), file by file.

    Shapes: W (o, i), A (r, i), B (o, r). The sum is taken in float32 and has the type of W.

    Raises:
        RuntimeError: the folder has adapters of layers that are not linear.
    """
    paths = sorted(folder.glob("*.safetensors"))
    weight_map: dict[str, str] = {}
    with ExitStack() as stack:
        files: dict[Path, Any] = {path: stack.enter_context(safe_open(path, "pt")) for path in paths}
        file_of = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118 -- no mapping
        bases = [name.removesuffix(f"{_BASE}weight") for name in file_of if name.endswith(f"{_BASE}weight")]
        linear = {module for module in bases if module + _DOWN in file_of}
        merged = {module + end for module in linear for end in (_DOWN, _UP)}
        if others := sorted(name for name in file_of if ".lora_" in name and name not in merged):
            text = f"{len(others)} adapters in {folder} are not of linear layers and cannot be merged: {others[0]}"
            raise RuntimeError(text)
        for path, file in files.items():
            weights: dict[str, torch.Tensor] = {}
            for name in sorted(set(file.keys()) - merged):
                weight, module = file.get_tensor(name), name.removesuffix(f"{_BASE}weight")
                if module in linear:
                    down, up = (file_of[module + end].get_tensor(module + end).float() for end in (_DOWN, _UP))
                    weight = (weight.float() + alpha / rank * (up @ down)).to(weight.dtype)
                weights[name.removeprefix(_PREFIX).replace(_BASE, ".")] = weight.contiguous()
            save_file(weights, path.with_suffix(".merged"), metadata={"format": "pt"})
            weight_map |= dict.fromkeys(weights, path.name)
    for path in paths:
        path.with_suffix(".merged").replace(path)
    if (index := folder / INDEX).exists():
        index.write_text(json.dumps({**json.loads(index.read_text()), "weight_map": weight_map}, indent=2))
