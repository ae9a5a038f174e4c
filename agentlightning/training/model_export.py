"""Finds a trained model and exports it in the formats of other programs: merged, adapter, GGUF."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import PreTrainedModel

from agentlightning.base.private_files import private_folder
from agentlightning.errors import BadRequestError, MissingExtraError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.training.checkpoint import CHECKPOINTS, MANIFEST, CheckpointFolder, read_checkpoint
from agentlightning.training.learner.policy import Policy
from agentlightning.training.policy_files import ADAPTER, fingerprint_of, model_in, restore_policy
from agentlightning.training.records import RunLog

ExportFormat = Literal["merged", "adapter", "gguf"]
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.*", "merges.txt")


@dataclass(frozen=True)
class TrainedModel:
    """The location of a trained model."""

    path: Path
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Metadata of its checkpoint; empty for the folder of a plain transformers model."""

    @property
    def has_adapter(self) -> bool:
        """True if only an adapter was trained."""
        return (self.path / ADAPTER).is_file()

    def load(self) -> Policy:
        """Load the model.

        Raises:
            BadRequestError: the base model of its adapter is not the one that it was trained on.
        """
        settings = self.facts.get("settings", {})
        if "trl" in settings and self.has_adapter:
            raise BadRequestError(
                f"The adapter in {str(self.path)!r} was trained by TRL. Load it with peft, or use the folder model/ of "
                "its run, which has the model merged with the adapter"
            )
        if not self.facts or "trl" in settings:
            return Policy.load(self.path)
        if self.has_adapter and fingerprint_of(settings["model"]) != self.facts["model_files"]:
            raise BadRequestError(
                f"The adapter in {str(self.path)!r} was trained on model={settings['model']!r}, whose files are "
                "missing or have changed"
            )
        policy = Policy.load(
            model_in(self.path, settings["model"]),
            lora=settings["lora"],
            seed=settings["seed"],
            bf16=settings.get("bf16", False),
        )
        version, digest = self.facts["weight_version"], self.facts["digest"]
        restore_policy(policy, self.path, weight_version=version, digest=digest, serves_only=True)
        return policy


def trained_in(folder: str | Path) -> TrainedModel:
    """Return the trained model in a folder: a checkpoint, a run (its newest good checkpoint), or a model.

    Raises:
        BadRequestError: the folder is none of these, is broken, or holds several policies.
    """
    path = Path(folder)
    is_checkpoint = (path / MANIFEST).is_file()
    checkpoint = read_checkpoint(path) if is_checkpoint else CheckpointFolder(path / CHECKPOINTS).last_good()
    if checkpoint is None:
        if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
            return TrainedModel(path)
        raise BadRequestError(
            f"{str(path)!r} is not a checkpoint, the folder of a run with a checkpoint, or the folder of a "
            "transformers model"
        )
    if names := checkpoint.facts.get("digests"):
        models = Path(checkpoint.facts["folder"]) / "model"
        raise BadRequestError(
            f"{str(checkpoint.path)!r} holds several policies: {', '.join(names)}. Use the model of one policy, which "
            f"the run writes at its end: {str(models / next(iter(names)))!r}"
        )
    return TrainedModel(checkpoint.path, checkpoint.facts)


async def trained_by(store: LightningStore, run_id: str) -> TrainedModel:
    """Return the newest checkpoint of a run in a store.

    Raises:
        NotFoundError: the store has no such run, or the run has no checkpoint.
        BadRequestError: the checkpoint is not on this machine, or is broken.
    """
    record = await RunLog(store, run_id).latest("checkpoint")
    if record is None:
        raise NotFoundError(f"The store has no checkpoint of run {run_id!r}. To list its runs: agl runs list")
    return _trained_by(run_id, record.data["path"])


def _trained_by(run_id: str, path: str) -> TrainedModel:
    if not os.path.isdir(path):
        raise BadRequestError(
            f"The newest checkpoint of run {run_id!r} was written to {path!r}, which does not exist. If it was "
            "moved, pass the folder of the checkpoint or of the run instead of the run's id"
        )
    return trained_in(path)


def export(trained: TrainedModel, form: ExportFormat, out: str | Path) -> list[str]:
    """Write a trained model atomically into a new folder, and return the names of its files.

    `merged`: a transformers model with adapters added to its weights. `adapter`: the format of peft. `gguf`: one file
    for llama.cpp and others, with the weights in their own precision.

    Raises:
        BadRequestError: the folder is not empty, or the model cannot be written in this format (with the reason).
        MissingExtraError: the package `gguf` is not installed.
    """
    place = Path(out)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise BadRequestError(f"{str(place)!r} already exists and is not empty. Choose another folder")
    if form == "adapter" and not trained.has_adapter:
        raise BadRequestError(
            f"{str(trained.path)!r} has no adapter because all weights were trained. Use the format 'merged'"
        )
    private_folder(place.absolute().parent)
    unfinished = place.absolute().parent / f".{place.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    try:
        _fill(unfinished, trained, form)
        if place.exists():
            place.rmdir()
        os.rename(unfinished, place)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return sorted(path.name for path in place.iterdir())


def _fill(folder: Path, trained: TrainedModel, form: ExportFormat) -> None:
    if form == "adapter":
        tokenizer = {file.name for pattern in _TOKENIZER_FILES for file in trained.path.glob(pattern)}
        for name in (*_ADAPTER_FILES, *tokenizer):
            shutil.copyfile(trained.path / name, folder / name)
        return
    policy = trained.load()
    if form == "merged":
        policy.save(folder)
    else:
        write_gguf(policy.merged(), folder / "model.gguf")
        policy.tokenizer.save_pretrained(folder)


# --- GGUF ------------------------------------------------------------------------------------------------------------

_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_WAY_OUT = "Export it as 'merged' and convert that with convert_hf_to_gguf.py of llama.cpp"


def write_gguf(model: PreTrainedModel, file: Path) -> None:
    """Write a model of the Llama architecture as a GGUF file, with the writer of the package `gguf`.

    The weights keep their precision: float32 as F32, bfloat16 as BF16. To quantize, use llama.cpp's tool. The file has
    no vocabulary (`no_vocab`), so its input and output are token ids: GGUF has names only for the splitting rules of
    well-known tokenizers, and a similar but wrong name would split text differently. Source: the GGUF specification,
    and `LlamaModel` in llama.cpp's `convert_hf_to_gguf.py` for names and row order.

    Raises:
        BadRequestError: the architecture, or a part of it, is not supported. The message names it.
        MissingExtraError: the package `gguf` is not installed.
    """
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    _check_is_writable(config, rope.get("rope_type", "default"))
    try:
        import gguf  # pyright: ignore[reportMissingImports] -- an extra
    except ModuleNotFoundError as error:
        raise MissingExtraError("agl export --format gguf", "gguf", "gguf") from error
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    writer: Any = cast("Any", gguf).GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // heads)
    writer.add_rope_freq_base(rope.get("rope_theta", getattr(config, "rope_theta", 10_000.0)))
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name, ids in (("eos", config.eos_token_id), ("bos", config.bos_token_id), ("pad", config.pad_token_id)):
        if isinstance(ids, int):
            getattr(writer, f"add_{name}_token_id")(ids)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, projection = tensor.detach().cpu(), name.split(".")[-2]
        if projection in ("q_proj", "k_proj"):  # llama.cpp rotates neighbours: (heads x width, n), halves to pairs
            rows, columns = values.shape
            halves = values.reshape(heads if projection == "q_proj" else key_heads, 2, -1, columns)
            values = halves.swapaxes(1, 2).reshape(rows, columns)
        if values.ndim > 1 and values.dtype == torch.bfloat16:
            data = values.contiguous().view(torch.int16).numpy().view("uint8")
            writer.add_tensor(_gguf_name(name), data, raw_dtype=cast("Any", gguf).GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(_gguf_name(name), values.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check_is_writable(config: Any, rope_type: str) -> None:
    if config.model_type != "llama":
        raise BadRequestError(
            f"Only models of the Llama architecture can be written as GGUF; this one is {config.model_type!r}. "
            f"{_WAY_OUT}"
        )
    refused = {
        f"rope_type {rope_type!r}": rope_type != "default",
        "biases": bool(config.attention_bias or config.mlp_bias),
        f"a head width of {config.head_dim}": config.head_dim
        not in (None, config.hidden_size // config.num_attention_heads),
    }
    if reasons := [name for name, is_so in refused.items() if is_so]:
        raise BadRequestError(
            f"This Llama model has {' and '.join(reasons)}, which the GGUF export does not support. {_WAY_OUT}"
        )


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)  # model.layers.3.mlp.up_proj
    return f"blk.{layer}.{_IN_LAYER[part]}.{kind}"
