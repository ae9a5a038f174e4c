"""An exported model is read by the programs that it is for, and replies the same as the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import agentlightning as agl
from agentlightning.training.checkpoint import BrokenCheckpointError, CheckpointFolder
from agentlightning.training.learner.policy import Policy
from agentlightning.training.model_export import export, trained_in, write_gguf
from agentlightning.training.policy_files import digest_of, fingerprint_of, save_policy
from tests.training.test_policy_files import learn

_TOKENS = torch.tensor([[11, 12, 13, 40, 41, 42, 7]])
_LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


def checkpoint_of(model: Path, folder: Path, lora: Any = None) -> tuple[Path, torch.Tensor]:
    """Write a checkpoint of a policy that has learned something; return the folder of its run and its logits."""
    policy = Policy.load(model, learning_rate=1e-1, lora=lora)
    learn(policy)
    settings = {"model": str(model), "lora": lora, "seed": 0}
    facts = {"digest": digest_of(policy), "weight_version": 1, "settings": settings}
    facts["model_files"] = fingerprint_of(model)
    CheckpointFolder(folder / "checkpoints").write(1, lambda place: save_policy(policy, place), facts)
    with torch.no_grad():
        return folder, policy.model(_TOKENS).logits


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(_TOKENS).logits


@pytest.mark.parametrize("lora", [None, _LORA])
def test_a_merged_export_is_a_model_of_transformers(model_folder: Path, tmp_path: Path, lora: Any) -> None:
    run, logits = checkpoint_of(model_folder, tmp_path / "run", lora)
    assert "model.safetensors" in export(trained_in(run), "merged", tmp_path / "out")
    assert torch.allclose(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits, atol=1e-5)
    assert not torch.allclose(logits_of(AutoModelForCausalLM.from_pretrained(model_folder)), logits, atol=1e-2)
    AutoTokenizer.from_pretrained(tmp_path / "out")
    with pytest.raises(agl.BadRequestError, match="not empty"):
        export(trained_in(run), "merged", tmp_path / "out")


def test_an_adapter_export_is_read_by_peft(model_folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    run, logits = checkpoint_of(model_folder, tmp_path / "run", _LORA)
    files = export(trained_in(run / "checkpoints" / "checkpoint-1"), "adapter", tmp_path / "out")
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(files)
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    assert torch.equal(logits_of(PeftModel.from_pretrained(base, tmp_path / "out")), logits)


def test_an_adapter_on_another_model_is_refused(model_folder: Path, tmp_path: Path) -> None:
    Policy.load(model_folder).save(tmp_path / "base")
    run, _ = checkpoint_of(tmp_path / "base", tmp_path / "run", _LORA)
    learned = Policy.load(tmp_path / "base", learning_rate=1e-1)
    learn(learned)
    learned.save(tmp_path / "base")
    with pytest.raises(agl.BadRequestError, match="missing or have changed"):
        export(trained_in(run), "merged", tmp_path / "out")


def test_a_missing_model_or_adapter_and_a_broken_checkpoint_are_refused(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(agl.BadRequestError, match="is not a checkpoint"):
        trained_in(tmp_path)
    run, _ = checkpoint_of(model_folder, tmp_path / "run")
    with pytest.raises(agl.BadRequestError, match="Use the format 'merged'"):
        export(trained_in(run), "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with (run / "checkpoints" / "checkpoint-1" / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"abcd")
    with pytest.raises(BrokenCheckpointError, match=r"the content of model.safetensors has changed"):
        trained_in(run / "checkpoints" / "checkpoint-1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_a_gguf_export_with_the_same_logits(
    model_folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed: pip install 'agl-framework[gguf]'")
    run, logits = checkpoint_of(model_folder, tmp_path / "run")
    if dtype == torch.float32:
        assert {"model.gguf", "tokenizer.json"} <= set(export(trained_in(run), "gguf", tmp_path / "out"))
    else:
        (tmp_path / "out").mkdir()
        write_gguf(trained_in(run).load().model.to(dtype), tmp_path / "out" / "model.gguf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32)
    if dtype == torch.float32:
        assert torch.equal(logits_of(read), logits)
    else:
        rounded = trained_in(run).load().model  # its weights, and nothing that is computed from the configuration
        for weight in rounded.parameters():
            weight.data = weight.data.to(dtype).float()
        assert torch.allclose(logits_of(read), logits_of(rounded), atol=1e-5)


def test_grouped_heads_and_an_untied_head_are_written_in_their_order(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed: pip install 'agl-framework[gguf]'")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    write_gguf(model, tmp_path / "model.gguf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert torch.allclose(logits_of(read), logits_of(model), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("model_type", "gpt2", "'gpt2'"),
        ("attention_bias", True, "biases"),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1.0}, "rope_type 'llama3'"),
    ],
)
def test_a_model_that_gguf_cannot_hold_is_refused(
    model_folder: Path, tmp_path: Path, name: str, value: object, error: str
) -> None:
    model = Policy.load(model_folder).model
    setattr(model.config, name, value)
    with pytest.raises(agl.BadRequestError, match=error):
        write_gguf(model, tmp_path / "model.gguf")
