"""The learner, the engine and whole runs with the model on a GPU: the same results as on a CPU, within rounding."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import agentlightning as agl
from agentlightning.adapter.rows.samples import Sample
from agentlightning.engine.completion import Completion
from agentlightning.engine.decode_thread import DecodeLoop
from agentlightning.engine.decoder import Decoder, generate
from agentlightning.errors import OutOfMemoryError
from agentlightning.training.learner.memory import needed_memory
from agentlightning.training.learner.policy import Policy
from agentlightning.training.learner.update import UpdateSettings
from agentlightning.training.policy_files import digest_of, restore_policy, save_policy
from agentlightning.training.settings import GRPOSettings
from tests.algorithm.parts import SMALL, wants_digits
from tests.engine.byte_policy import byte_tokenizer
from tests.training.conformance.cases import GRPO, STEPS, read
from tests.training.conformance.test_resume import play
from tests.training.learner.rows import make_advantages, make_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def grouped_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 40 million parameters whose eight query heads share two key heads, as those of most large models do,
    and whose probabilities are uneven."""
    folder, tokenizer = tmp_path_factory.mktemp("grouped"), byte_tokenizer()
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config)
    model.model.norm.weight.data.mul_(6)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def limit() -> Iterator[Any]:
    """Let this process have so many bytes of the GPU beside what it holds."""

    def set_limit(room: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + room) / total)

    yield set_limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def first_moments(policy: Policy) -> torch.Tensor:
    """A tenth of the gradient of the first step, of all weights."""
    state = policy.state().optimizer
    return torch.cat([value.flatten().cpu() for name, value in sorted(state.items()) if name.startswith("exp_avg/")])


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("padding_free", [True, False])
def test_losses_and_gradients_are_those_of_the_cpu(grouped_model: Path, lora: Any, padding_free: bool) -> None:
    rows, advantages = make_rows(12, 4096), make_advantages(12)
    results, gradients = [], []
    for device in ("cpu", "cuda"):
        policy = Policy.load(grouped_model, device=device, lora=lora, padding_free=padding_free)
        results.append(policy.update(rows, advantages, UpdateSettings(max_grad_norm=1e9)))
        gradients.append(first_moments(policy))
    on_cpu, on_gpu = results
    assert on_gpu.notes == on_cpu.notes
    for name in ("loss", "entropy", "grad_norm", "approx_kl"):
        assert on_gpu.figures[name] == pytest.approx(on_cpu.figures[name], rel=1e-4, abs=1e-5)
    for one, other in zip(on_gpu.rows, on_cpu.rows, strict=True):
        assert one["trainer_logprobs"] == pytest.approx(other["trainer_logprobs"], abs=1e-4)
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 1e-4


@pytest.mark.parametrize(("bf16", "largest", "mean"), [(False, 1e-3, 1e-4), (True, 0.5, 0.05)])
def test_the_engine_gives_the_probabilities_that_the_learner_computes(
    grouped_model: Path, bf16: bool, largest: float, mean: float
) -> None:
    policy = Policy.load(grouped_model, device="cuda", bf16=bf16)
    completions = [Completion(list(range(5, 20 + 7 * n)), 40, seed=n) for n in range(16)]
    generate(Decoder(policy.model, ()), completions)
    rows = [
        Sample(
            f"rollout-{n}",
            "a",
            [*c.prompt_ids, *c.token_ids],
            [0] * len(c.prompt_ids) + [1] * len(c.token_ids),
            [0.0] * len(c.prompt_ids) + c.logprobs,
            [],
            [],
        )
        for n, c in enumerate(completions)
    ]
    result = policy.update(rows, make_advantages(16))
    distances = torch.cat(
        [torch.from_numpy(abs(row["trainer_logprobs"] - row["engine_logprobs"])) for row in result.rows]
    )
    assert float(distances.max()) < largest
    assert float(distances.mean()) < mean
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert result.figures["steps"] == 1


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("begins", ["cpu", "cuda"])
def test_a_checkpoint_made_on_one_device_opens_on_the_other(
    grouped_model: Path, tmp_path: Path, begins: str, lora: Any
) -> None:
    rows, advantages = make_rows(8, 4096), make_advantages(8)
    made = Policy.load(grouped_model, device=begins, lora=lora)
    made.update(rows, advantages)
    save_policy(made, tmp_path)
    digest = digest_of(made)
    other = Policy.load(grouped_model if lora else tmp_path, device={"cpu": "cuda", "cuda": "cpu"}[begins], lora=lora)
    restore_policy(other, tmp_path, weight_version=1, digest=digest)
    assert digest_of(other) == digest
    after = [policy.update(rows, advantages).figures for policy in (made, other)]
    assert after[1]["loss"] == pytest.approx(after[0]["loss"], rel=1e-3, abs=1e-5)
    assert after[1]["grad_norm"] == pytest.approx(after[0]["grad_norm"], rel=1e-3)


@pytest.mark.timeout(400)
def test_a_deterministic_run_that_is_killed_and_goes_on_has_the_weights_of_one_that_was_not(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVICE", "cuda")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
    assert play(GRPO, untrained_model, killed, "before ledger 3") == -signal.SIGKILL
    assert play(GRPO, untrained_model, killed) == 0
    assert play(GRPO, untrained_model, whole) == 0
    lines, expected = read(killed).lines, read(whole).lines
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, other in zip(lines, expected, strict=True):
        assert (line["mean_reward"], line["weights"]) == (other["mean_reward"], other["weights"])


@pytest.mark.parametrize(
    "algorithm",
    [
        lambda **settings: agl.GRPO(**settings, num_iterations=2),
        lambda **settings: agl.PPO(**settings, num_ppo_epochs=2),
        lambda **settings: agl.GRPO(**settings, num_iterations=2, beta=0.01, bf16=True),
    ],
    ids=["grpo", "ppo", "bfloat16 with a penalty"],
)
def test_a_run_learns(untrained_model: Path, tmp_path: Path, algorithm: Any) -> None:
    settings = {"max_steps": 12, "batch_size": 4, "num_generations": 8, "learning_rate": 5e-3, "device": "cuda"}
    trainer = agl.Trainer(
        algorithm=algorithm(**{**SMALL, "model": untrained_model, "output_dir": tmp_path, **settings}),
        store=agl.InMemoryLightningStore(),
        strategy="shm",
        runner={"type": "agentlightning.LitAgentRunner", "concurrency": 8},
    )
    trainer.fit(wants_digits, train_dataset=["one", "two", "three", "four"])
    rewards = [figures.mean_reward or 0.0 for figures in trainer.result.metrics]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.1, rewards
    AutoModelForCausalLM.from_pretrained(trainer.result.model_path)


def test_a_step_without_the_memory_is_taken_in_smaller_parts_with_the_same_result(
    grouped_model: Path, limit: Any
) -> None:
    rows, advantages = make_rows(24, 4096, shortest=500, longest=520), make_advantages(24)
    results = []
    for room in (1500, 60_000):
        policy = Policy.load(grouped_model, device="cuda", max_tokens_per_forward=100_000)
        policy.state()
        limit(room * 2**20)
        results.append(policy.update(rows, advantages))
        limit(60_000 * 2**20)
    scarce, ample = results
    assert "out of memory with 24 rows" in scarce.notes[0]
    assert ample.notes == []
    for name in ("loss", "grad_norm"):
        assert scarce.figures[name] == pytest.approx(ample.figures[name], rel=1e-3, abs=1e-5)


def test_one_row_that_is_too_much_is_an_error_and_changes_no_weight(grouped_model: Path, limit: Any) -> None:
    policy = Policy.load(grouped_model, device="cuda")
    policy.state()
    digest = digest_of(policy)
    limit(200 * 2**20)
    with pytest.raises(OutOfMemoryError, match=r"one row of \d+ tokens does not fit into the memory of cuda:0"):
        policy.update(make_rows(2, 4096, shortest=4000, longest=4000), [1.0, -1.0])
    limit(60_000 * 2**20)
    assert digest_of(policy) == digest


@pytest.mark.parametrize("others", [{}, {"bf16": True}, {"gradient_checkpointing": True}, {"lora": LORA}])
def test_the_sum_of_memory_is_what_an_update_takes(grouped_model: Path, others: dict[str, Any]) -> None:
    settings = GRPOSettings(
        model=str(grouped_model),
        device="cuda",
        max_model_length=4096,
        batch_size=1,
        num_generations=2,
        max_completion_length=2458,
        **others,
    )
    parts = [part for part in needed_memory(settings) if "calls" not in part.what]
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    policy = Policy.load(
        grouped_model,
        device="cuda",
        bf16=settings.bf16,
        lora=settings.lora,
        gradient_checkpointing=settings.gradient_checkpointing,
    )
    policy.update(make_rows(2, 4096, shortest=4096, longest=4096), [1.0, -1.0])
    share = sum(part.bytes for part in parts) / (torch.cuda.max_memory_allocated() - before)
    assert 0.75 < share < 1.05, [(part.what, part.bytes) for part in parts]


def test_offloaded_activations_do_not_take_the_memory_of_the_gpu(grouped_model: Path) -> None:
    peaks: list[int] = []
    for offloading in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        policy = Policy.load(grouped_model, device="cuda", activation_offloading=offloading)
        policy.state()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        policy.update(make_rows(2, 4096, shortest=4096, longest=4096), [1.0, -1.0])
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del policy
    assert peaks[1] < 0.7 * peaks[0]


def test_an_engine_without_the_memory_for_all_calls_answers_them_in_smaller_numbers(
    grouped_model: Path, limit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Policy.load(grouped_model, device="cuda")
    replies = []
    for room in (150, 60_000):
        limit(room * 2**20)
        loop = DecodeLoop(policy, max_batch=64, max_waiting=64)
        loop.start()
        made = [Completion(list(range(5, 25)), 600, seed=n, temperature=0.0) for n in range(32)]
        for finished in [loop.submit([one]) for one in made]:
            assert finished.result(timeout=100) == 0
        loop.stop(10)
        replies.append([one.token_ids[:30] for one in made])
        limit(60_000 * 2**20)
    assert "out of memory with 32 concurrent calls (CUDA out of memory" in caplog.text
    assert replies[0] == replies[1]


def test_a_run_on_a_cpu_leaves_the_gpu_alone(untrained_model: Path, tmp_path: Path) -> None:
    program = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from agentlightning.training.policy_files import restore_policy, save_policy, digest_of\n"
        "from agentlightning.training.learner.policy import Policy\n"
        "policy = Policy.load(sys.argv[1])\n"
        "save_policy(policy, Path(sys.argv[2]))\n"
        "restore_policy(policy, Path(sys.argv[2]), weight_version=0, digest=digest_of(policy))\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(untrained_model), str(tmp_path)], check=True, timeout=100)


@pytest.mark.filterwarnings("ignore")
def test_trl_computes_in_bfloat16_and_its_engine_answers(untrained_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is in an environment of its own: make test-trl")
    settings = {"max_steps": 4, "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 4}
    trainer = agl.Trainer(
        algorithm=agl.TRL(model=untrained_model, output_dir=tmp_path, progress="none", **settings),
        store=agl.InMemoryLightningStore(),
        strategy="shm",
        runner={"type": "agentlightning.LitAgentRunner", "concurrency": 8},
    )
    trainer.fit(wants_digits, train_dataset=["one", "two", "three", "four"])
    assert trainer.result.metrics[-1].calls_trained > 0
