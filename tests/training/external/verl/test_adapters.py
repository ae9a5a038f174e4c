"""The model of a VERL run with adapters equals the one that PEFT merges, whole and in several files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from agentlightning.training.external.verl.adapters import INDEX, merge_adapters


def with_adapters(model: Path, **settings: Any) -> Any:
    torch.manual_seed(0)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    made: Any = get_peft_model(loaded, LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", **settings))
    for name, tensor in made.named_parameters():
        if "lora_B" in name:  # 0 at the start
            torch.nn.init.normal_(tensor, std=0.1)
    return made


def saved(made: Any, model: Path, folder: Path, files: int) -> Path:
    """Write the tensors of a model under PEFT's names, as VERL does, in so many files."""
    folder.mkdir()
    (folder / "config.json").write_text((model / "config.json").read_text())
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}  # weights may be tied
    names = [f"model-{n}.safetensors" for n in range(files)] if files > 1 else ["model.safetensors"]
    parts: list[dict[str, Any]] = [{} for _ in names]
    for number, name in enumerate(sorted(state)):
        parts[number % files][name] = state[name]  # a weight and its adapters are in different files
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, metadata={"format": "pt"})
    if files > 1:
        where = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.mark.parametrize("files", [1, 3])
def test_the_weights_are_those_that_peft_merges(untrained_model: Path, tmp_path: Path, files: int) -> None:
    made = with_adapters(untrained_model)
    folder = saved(made, untrained_model, tmp_path / "model", files)
    merge_adapters(folder, rank=4, alpha=12)
    merged, loading_info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert (set(loading_info["missing_keys"]), set(loading_info["unexpected_keys"])) == (set(), set())
    target = made.merge_and_unload().state_dict()
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, target[name], rtol=1e-6, atol=1e-7)
    before: Any = AutoModelForCausalLM.from_pretrained(untrained_model)
    assert not torch.equal(
        before.state_dict()["model.layers.0.self_attn.q_proj.weight"], target["model.layers.0.self_attn.q_proj.weight"]
    )
    suffixes = [".json"] * (1 + (files > 1)) + [".safetensors"] * files
    assert sorted(path.suffix for path in folder.iterdir()) == suffixes


def test_adapters_that_are_no_matrices_of_a_layer_are_named_and_nothing_is_changed(
    untrained_model: Path, tmp_path: Path
) -> None:
    made = with_adapters(untrained_model)
    folder = saved(made, untrained_model, tmp_path / "model", 1)
    strange = "base_model.model.model.embed_tokens.lora_embedding_A.default"
    save_file({strange: torch.ones(2)}, folder / "more.safetensors")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(RuntimeError, match=r"1 adapters in .*lora_embedding_A"):
        merge_adapters(folder, rank=4, alpha=12)
    assert (folder / "model.safetensors").read_bytes() == before
    assert list(folder.glob("*.merged")) == []
