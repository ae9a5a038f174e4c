"""A trained model in the forms that other programs read: merged, adapter, GGUF."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

from agentlightning.errors import BadRequestError
from agentlightning.private_files import private_folder
from agentlightning.training.checkpoint.gguf_file import write_gguf
from agentlightning.training.checkpoint.trained import Trained

ExportFormat = Literal["merged", "adapter", "gguf"]
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.*", "merges.txt")


def export(trained: Trained, form: ExportFormat, out: str | Path) -> list[str]:
    """Write a trained model into a new folder, whole or not at all, and return the names of its files.

    `merged`: a transformers model, adapters added to its weights. `adapter`: what peft reads. `gguf`: one file for
    llama.cpp and others, with the weights in their own precision.

    Raises:
        BadRequestError: the folder holds something, or the model cannot be written in this form; says why.
        MissingExtraError: the package `gguf` is not installed.
    """
    place = Path(out)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise BadRequestError(f"{str(place)!r} is there already and not empty; choose another place")
    if form == "adapter" and not trained.has_adapter:
        raise BadRequestError(
            f"{str(trained.path)!r} has no adapter: all weights were trained; use the format 'merged'"
        )
    private_folder(place.absolute().parent)
    unfinished = place.absolute().parent / f".{place.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    try:
        _FILL[form](trained, unfinished)
        if place.exists():
            place.rmdir()
        os.rename(unfinished, place)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return sorted(path.name for path in place.iterdir())


def _merged(trained: Trained, folder: Path) -> None:
    trained.load().save(folder)


def _adapter(trained: Trained, folder: Path) -> None:
    for name in _ADAPTER_FILES:
        shutil.copyfile(trained.path / name, folder / name)
    for pattern in _TOKENIZER_FILES:
        for file in trained.path.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def _gguf(trained: Trained, folder: Path) -> None:
    policy = trained.load()
    write_gguf(policy.merged(), folder / "model.gguf")
    policy.tokenizer.save_pretrained(folder)


_FILL = {"merged": _merged, "adapter": _adapter, "gguf": _gguf}
