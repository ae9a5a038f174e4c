"""`agl export`: write a trained model in the format of another program."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from agentlightning.base.terminal import counted
from agentlightning.cli.output import STORE, say, with_store

if TYPE_CHECKING:
    from agentlightning.training.model_export import TrainedModel


class Form(StrEnum):
    """Format of the written model."""

    MERGED = "merged"
    """A transformers model, with adapters merged into its weights."""
    ADAPTER = "adapter"
    """An adapter in PEFT's format."""
    GGUF = "gguf"
    """One file of weights for llama.cpp and compatible programs, with the tokenizer next to it."""


MODEL = typer.Argument(metavar="CHECKPOINT|RUN", help="Folder of a checkpoint, run or model, or the id of a run")


def export(
    model: str = MODEL,
    out: Path = typer.Option(help="New folder to write"),
    form: Form = typer.Option(Form.MERGED, "--format", help="merged, adapter, or gguf (Llama architecture only)"),
    store: str = STORE,
) -> None:
    """Write the model of a checkpoint in a format that other programs read.

    --store is used only to look up a run by its id.

    Example: agl export runs/20260101-120000 --format gguf --out model
    """
    from agentlightning.training.model_export import export as write

    checkpoint = trained_at(model, store)
    files = write(checkpoint, form.value, out)
    say(f"{checkpoint.path} exported to {out}: {', '.join(files)}")


def trained_at(model: str, store: str) -> TrainedModel:
    """Return the trained model in a folder, or of a run in the store."""
    import agentlightning.engine.torch_setup  # noqa: F401 -- says what is not installed # pyright: ignore[reportUnusedImport]
    from agentlightning.errors import NotFoundError
    from agentlightning.training.model_export import trained_by, trained_in

    if Path(model).is_dir():
        return trained_in(model)
    try:
        return with_store(store, lambda connection: trained_by(connection, model))
    except NotFoundError as error:
        raise NotFoundError(
            f"{model!r} is neither the folder of a checkpoint, run or model nor the id of a run with a checkpoint. "
            f"{error}. Or pass an existing folder, such as runs/20260101-120000"
        ) from None


def replay(
    run: str = typer.Argument(metavar="RUN", help="Id of the run"),
    step: int = typer.Option(min=1, help="Step to repeat"),
    store: str = STORE,
    folder: Path | None = typer.Option(None, help="Folder of the run, if it was moved"),
) -> int:
    """Repeat a step of a run from the nearest checkpoint and the ledger, and compare the result with the record.

    Compares weights, loss, gradient norm and the log-probability of each token. Nothing is sampled or written.
    Exit code 1 if a value differs. Example: agl replay run-1a2b3c --step 7 --store runs/20260101-120000
    """
    import agentlightning.engine.torch_setup  # noqa: F401 -- says what is not installed # pyright: ignore[reportUnusedImport]
    from agentlightning.training.replay import replay as run_replay

    result = with_store(store, lambda connection: run_replay(connection, run, step, folder))
    say(f"step {step} of run {run}, from {result.source}: {counted(result.updates, 'update')} repeated")
    for difference in result.differences:
        say(f"differs: {difference}")
    if not result.differences:
        say(f"bit-identical: weights, loss, gradient norm, log-probabilities of {counted(result.tokens, 'token')}")
    return 1 if result.differences else 0
