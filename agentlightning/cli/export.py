"""`agl export`: a trained model in the form that another program reads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from agentlightning.cli.support.output import say
from agentlightning.cli.support.store_access import STORE, with_store

if TYPE_CHECKING:
    from agentlightning.training.model_export import Trained


class Form(StrEnum):
    """What is written."""

    MERGED = "merged"
    """A transformers model, adapters added to its weights."""
    ADAPTER = "adapter"
    """What peft reads."""
    GGUF = "gguf"
    """One file of weights for llama.cpp and others, with the tokenizer beside it."""


MODEL = typer.Argument(metavar="CHECKPOINT|RUN", help="Folder of a checkpoint, of a run or of a model; or a run's id.")


def export(
    model: str = MODEL,
    out: Path = typer.Option(help="New folder to write."),
    form: Form = typer.Option(Form.MERGED, "--format", help="merged, adapter, or gguf (Llama architecture)."),
    store: str = STORE,
) -> int:
    """Write the model of a checkpoint in the form that another program reads. `--store` is asked for a run's id.

    Example: agl export runs/20260101-120000 --format gguf --out model
    """
    from agentlightning.training.model_export import export as write

    trained = trained_at(model, store)
    files = write(trained, form.value, out)
    say(f"{trained.path} is written to {out}: {', '.join(files)}")
    return 0


def trained_at(model: str, store: str) -> Trained:
    """Return the trained model that an argument names: in a folder, or of a run that the store knows."""
    import agentlightning.engine.torch_setup  # noqa: F401 -- says what is not installed # pyright: ignore[reportUnusedImport]
    from agentlightning.training.model_export import trained_by, trained_in

    if Path(model).is_dir():
        return trained_in(model)
    return with_store(store, lambda opened: trained_by(opened, model))
