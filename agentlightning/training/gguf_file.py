"""Models of the Llama architecture as GGUF files, by the writer of the package `gguf`.

The weights keep their precision: float32 as F32, bfloat16 as BF16, so that nothing is lost; llama.cpp's own tool
quantizes. The file has no vocabulary (`no_vocab`): GGUF has names for the ways in which well-known tokenizers split
text, and a name that is nearly right would split it otherwise, without a word. Token ids go in and come out.
Source: the GGUF specification, and `LlamaModel` in llama.cpp's `convert_hf_to_gguf.py` for names and the order of rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.errors import BadRequestError, MissingExtraError

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


def write_gguf(model: PreTrainedModel, file: Path) -> None:
    """Write a model.

    Raises:
        BadRequestError: its architecture, or something in it, cannot be written; names it.
        MissingExtraError: the package `gguf` is not installed.
    """
    config: Any = model.config
    _check(config)
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
    writer.add_rope_freq_base(_rope(config).get("rope_theta", getattr(config, "rope_theta", 10_000.0)))
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name, ids in (("eos", config.eos_token_id), ("bos", config.bos_token_id), ("pad", config.pad_token_id)):
        if isinstance(ids, int):
            getattr(writer, f"add_{name}_token_id")(ids)
    kinds = cast("Any", gguf).GGMLQuantizationType
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        of_heads = {"q_proj": heads, "k_proj": key_heads}.get(name.split(".")[-2])
        values = tensor.detach().cpu() if of_heads is None else _interleaved(tensor.detach().cpu(), of_heads)
        if values.ndim > 1 and values.dtype == torch.bfloat16:
            data = values.contiguous().view(torch.int16).numpy().view("uint8")
            writer.add_tensor(_name(name), data, raw_dtype=kinds.BF16)
        else:
            writer.add_tensor(_name(name), values.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check(config: Any) -> None:
    if config.model_type != "llama":
        raise BadRequestError(
            f"GGUF files are written of models of the Llama architecture; this one is {config.model_type!r}. Export it "
            "as 'merged' and convert that with convert_hf_to_gguf.py of llama.cpp"
        )
    kind = _rope(config).get("rope_type", "default")
    refused = {
        f"rope_type {kind!r}": kind != "default",
        "biases": bool(config.attention_bias or config.mlp_bias),
        f"a head width of {config.head_dim}": config.head_dim
        not in (None, config.hidden_size // config.num_attention_heads),
    }
    if named := [name for name, is_so in refused.items() if is_so]:
        raise BadRequestError(
            f"This Llama model has {' and '.join(named)}, which is not written as GGUF here. Export it as 'merged' and "
            "convert that with convert_hf_to_gguf.py of llama.cpp"
        )


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def _name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)  # model.layers.3.mlp.up_proj
    return f"blk.{layer}.{_IN_LAYER[part]}.{kind}"


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return rows in the order of llama.cpp, which rotates neighbours: (heads x width, n), halves to pairs."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
