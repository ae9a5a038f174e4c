"""Adapters put into the weights of a checkpoint: VERL saves them under names that only PEFT reads."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

META: Final = "lora_train_meta.json"
"""VERL's file with `r` and `lora_alpha`, in the folder above the model."""
INDEX: Final = "model.safetensors.index.json"
_PREFIX: Final = "base_model.model."
_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def merge_adapters(folder: Path, *, rank: int, alpha: float) -> None:
    """Replace the weights in a folder by W + (alpha / r) B A (LoRA, arXiv:2106.09685, section 4.1), file by file.

    Shapes: W (o, i), A (r, i), B (o, r). The sum is taken in float32 and has the type of W.

    Raises:
        RuntimeError: it holds other adapters than those of linear layers.
    """
    files = sorted(folder.glob("*.safetensors"))
    with ExitStack() as stack:
        opened: dict[Path, Any] = {path: stack.enter_context(safe_open(path, "pt")) for path in files}
        place = {name: file for file in opened.values() for name in file.keys()}  # noqa: SIM118 -- no mapping
        merged, where = set[str](), dict[str, str]()
        for path, file in opened.items():
            kept: dict[str, torch.Tensor] = {}
            for name in file.keys():  # noqa: SIM118
                if name.endswith((_DOWN, _UP)):
                    continue
                tensor = file.get_tensor(name)
                module = name.removesuffix(f"{_BASE}weight")
                if module != name and module + _DOWN in place:
                    down = place[module + _DOWN].get_tensor(module + _DOWN).float()
                    up = place[module + _UP].get_tensor(module + _UP).float()
                    tensor = (tensor.float() + alpha / rank * (up @ down)).to(tensor.dtype)
                    merged |= {module + _DOWN, module + _UP}
                own = name.removeprefix(_PREFIX).replace(_BASE, ".")
                kept[own] = tensor.contiguous()
                where[own] = path.name
            save_file(kept, path.with_suffix(".merged"), metadata={"format": "pt"})
    if left := sorted(name for name in place if ".lora_" in name and name not in merged):
        for path in files:
            path.with_suffix(".merged").unlink()
        raise RuntimeError(f"{len(left)} adapters in {folder} are of no linear layer and cannot be merged: {left[0]}")
    for path in files:
        path.with_suffix(".merged").replace(path)
    if (index := folder / INDEX).exists():
        told = json.loads(index.read_text())
        index.write_text(json.dumps({**told, "weight_map": where}, indent=2))
