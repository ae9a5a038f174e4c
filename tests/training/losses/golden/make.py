"""Compute losses, gradients and advantages of random batches with TRL and VERL, and write the results.

    make golden         writes golden.json
    make test-golden    compares golden.json with what the packages say

Runs in an environment of its own (requirements.txt), without agentlightning. TRL has no functions for its advantages
and its importance weights: those lines are taken from the source of its trainer and run as they are. prime-rl is not
on PyPI: `PRIME_RL=<checkout> make golden` computes its losses (with a version that has `pg_loss_fn`); without it, the
stored ones stay.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import trl
import verl
from torch import Tensor
from trl import GRPOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.utils import nanstd
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import FSDPActorConfig

HERE = Path(__file__).parent
PRIME_RL = os.environ.get("PRIME_RL")
"""A checkout of prime-rl."""
STORED = json.loads((HERE / "golden.json").read_text())
LENGTH = 5
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
REWARDS = [1.0, 0.0, 0.25, 1.0, 0.5, 0.125]
SECOND = [3.0, 9.0, 4.0, 1.0, 2.0, 8.0]
WEIGHTS = [1.0, -0.25]
BOUNDS = {"token": (1.3, 0.7), "sequence": (4.0, 0.2)}
TEMPERATURES = {"sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.5}
GAMMA = {"vespo_k_pos": 2.5, "vespo_lambda_pos": 3.5, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
GROUPS = ["a", "a", "a", "b", "b", "b"]


def batch(seed: int) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)
    shape = (6, 7)
    new = -torch.rand(shape, generator=make) * 3
    mask = torch.rand(shape, generator=make) < 0.7
    mask[:, 0] = True
    rows = {"logprobs": new, "mask": mask, "advantages": torch.randn(6, generator=make)}
    for name in ("old_logprobs", "sampler_logprobs", "reference_logprobs"):
        rows[name] = new + torch.randn(shape, generator=make) * 0.4
    return rows | {"entropy": torch.rand(shape, generator=make) * 2}


def lines_of_trl(start: str, end: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the lines of TRL's trainer from one that holds `start` to before one that holds `end`."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions).splitlines()
    first = next(i for i, line in enumerate(source) if start in line)
    last = next(i for i in range(first, len(source)) if end in source[i])
    exec(textwrap.dedent("\n".join(source[first:last])), names)
    return names


# --- TRL ----------------------------------------------------------------------------------------------------------


def trl_loss(rows: dict[str, Tensor], loss_type: str, **settings: Any) -> tuple[Tensor, Tensor]:
    new = rows["logprobs"].clone().requires_grad_()
    mask = rows["mask"].int()
    corrected = settings.get("correction") is not None
    inputs = {
        "prompt_ids": torch.zeros(6, 1, dtype=torch.long),
        "prompt_mask": torch.ones(6, 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": rows["advantages"],
        "old_per_token_logps": rows["old_logprobs" if corrected else "sampler_logprobs"],
        "ref_per_token_logps": rows["reference_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    if corrected:
        inputs["importance_sampling_ratio"] = settings["correction"]
    me = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (new, rows["entropy"], None),
        aux_loss_enabled=False,
        top_entropy_quantile=settings.get("top_entropy_quantile", 1.0),
        off_policy_mask_threshold=settings.get("threshold"),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        importance_sampling_level=settings.get("level", "token"),
        beta=settings.get("beta", 0.0),
        args=SimpleNamespace(
            use_bias_correction_kl=settings.get("unbiased", True),
            delta=settings.get("delta"),
            steps_per_generation=1,
            **TEMPERATURES,
            **GAMMA,
        ),
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=settings.get("epsilon_high", 0.28),
        use_vllm=corrected,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH,
        entropy_coef=settings.get("entropy_coef", 0.0),
        _entropy_bonus_enabled="entropy_coef" in settings,
        use_adaptive_entropy=False,
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, dim, pad_index: x,
            sync_gradients=False,
        ),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    me.get_high_entropy_mask = lambda *arguments: GRPOTrainer.get_high_entropy_mask(me, *arguments)
    loss = GRPOTrainer._compute_loss(me, None, inputs)
    return loss.detach(), torch.autograd.grad(loss, new)[0]


def trl_correction(rows: dict[str, Tensor], mode: str, high: float | None, low: float | None) -> Tensor:
    me = SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=high,
        vllm_importance_sampling_clip_min=low,
    )
    names = {
        "self": me,
        "torch": torch,
        "math": __import__("math"),
        "mask": rows["mask"].int(),
        "old_per_token_logps": rows["old_logprobs"],
        "sampling_per_token_logps": rows["sampler_logprobs"],
    }
    start = "per_token_logps_diff = (old_per_token_logps - sampling_per_token_logps) * mask"
    end = "Compute the per-token log probabilities for the reference"
    return lines_of_trl(start, end, names)["vllm_importance_sampling_ratio"]


def trl_advantages(scale: str, aggregation: str = "sum_then_normalize") -> list[float]:
    several = aggregation == "normalize_then_sum"
    per_func = torch.tensor([REWARDS, SECOND]).T if several else torch.tensor([REWARDS]).T
    names = {
        "self": SimpleNamespace(
            multi_objective_aggregation=aggregation,
            reward_weights=torch.tensor(WEIGHTS if several else [1.0]),
            reward_funcs=per_func[0].tolist(),
            scale_rewards=scale,
        ),
        "torch": torch,
        "nanstd": nanstd,
        "device": "cpu",
        "num_generations": 3,
        "rewards_per_func": per_func,
    }
    start, end = "unscorable_mask = torch.isnan(rewards_per_func)", "Unscorable completions (every reward func"
    return lines_of_trl(start, end, names)["advantages"].tolist()


# --- VERL ---------------------------------------------------------------------------------------------------------


def verl_loss(rows: dict[str, Tensor], name: str, mode: str, **settings: Any) -> tuple[Tensor, Tensor]:
    new = rows["logprobs"].clone().requires_grad_()
    mask = rows["mask"].float()
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=3,
        clip_ratio=0.2,
        clip_ratio_low=settings.get("low", 0.2),
        clip_ratio_high=settings.get("high", 0.28),
        clip_ratio_c=settings.get("c", 1e9),
        ppo_mini_batch_size=6,
        ppo_micro_batch_size_per_gpu=6,
        loss_agg_mode=mode,
    )
    config.global_batch_info["loss_scale_factor"] = LENGTH if mode.endswith("norm") else None
    weights = settings.get("correction")
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=rows["sampler_logprobs" if weights is None else "old_logprobs"],
        log_prob=new,
        advantages=rows["advantages"][:, None].expand_as(new),
        response_mask=mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    if "kl" in settings:
        kl = core_algos.kl_penalty(new, rows["reference_logprobs"], settings["kl"])
        loss = loss + 0.1 * core_algos.agg_loss(loss_mat=kl, loss_mask=mask, loss_agg_mode=mode)
    return loss.detach(), torch.autograd.grad(loss, new)[0]


def verl_correction(rows: dict[str, Tensor], level: str, threshold: Any) -> Tensor:
    difference = rows["old_logprobs"] - rows["sampler_logprobs"]
    return compute_rollout_correction_weights(difference, rows["mask"].float(), level, threshold)[0]


def verl_advantages(rows: dict[str, Tensor], name: str, **extra: Any) -> list[float]:
    mask = rows["mask"].float()
    last = [max(t for t in range(7) if row[t]) for row in rows["mask"]]
    rewards = torch.zeros(6, 7)
    rewards[range(6), last] = torch.tensor(REWARDS)
    arguments = {"token_level_rewards": rewards, "response_mask": mask, **extra}
    if name != "reinforce_plus_plus":
        arguments["index"] = np.array(GROUPS)
    estimates, _ = core_algos.get_adv_estimator_fn(name)(**arguments)
    return [estimates[row, last[row]].item() for row in range(6)]


def verl_critic(seed: int) -> dict[str, Any]:
    """Return inputs and results of VERL's advantages and value loss: (4, 9) each, tokens of tools within."""
    make = torch.Generator().manual_seed(seed)
    shape = (4, 9)
    mask = (torch.rand(shape, generator=make) < 0.6).float()
    mask[:, 0] = 1
    values, rewards = torch.randn(shape, generator=make), torch.randn(shape, generator=make) * mask
    results: dict[str, Any] = {"mask": mask, "values": values, "rewards": rewards, "estimates": [], "losses": []}
    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.9, 0.0)):
        advantages, returns = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
        results["estimates"].append([gamma, lam, advantages.tolist(), returns.tolist()])
    returns = returns.detach()
    for cliprange in (0.2, 10.0):
        new = (values + torch.randn(shape, generator=make) * 0.5).requires_grad_()
        loss, share = core_algos.compute_value_loss(new, returns, values, mask, cliprange, "token-mean")
        gradient = torch.autograd.grad(loss, new)[0].tolist()
        results["losses"].append([cliprange, new.tolist(), returns.tolist(), loss.item(), share.item(), gradient])
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in results.items()}


# --- prime-rl -----------------------------------------------------------------------------------------------------


def prime_rl_loss(rows: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    sys.path.insert(0, f"{PRIME_RL}/src")
    from prime_rl.trainer.rl import loss as theirs

    new, mask = rows["logprobs"].clone().requires_grad_(), rows["mask"]
    inputs = theirs.LossInputs(
        trainer_logprobs=new,
        inference_logprobs=rows["sampler_logprobs"],
        ref_logprobs=None,
        advantages=rows["advantages"][:, None].expand_as(new),
        loss_mask=mask,
    )
    config = SimpleNamespace(adv_tau=1.0, kl_tau=0.01, dppo_mask_low=0.1, dppo_mask_high=0.1, ipo_threshold=0.1)
    function = {"dppo": theirs.default_loss_fn, "ipo": theirs.ipo_loss_fn}[name]
    loss = function(inputs, config).loss / mask.sum()
    return loss.detach(), torch.autograd.grad(loss, new)[0]


# --- all ----------------------------------------------------------------------------------------------------------


def correction_settings(mode: str, high: float | None, low: float | None) -> dict[str, Any]:
    return {
        "importance_sampling_correction": True,
        "importance_sampling_mode": mode,
        "importance_sampling_clip_max": high,
        "importance_sampling_clip_min": low,
    }


def losses(rows: dict[str, Tensor], seed: int) -> dict[str, Any]:
    """Return [our settings, loss, gradient] by the name of the case."""
    results: dict[str, Any] = {}

    def add(name: str, settings: dict[str, Any], result: tuple[Tensor, Tensor]) -> None:
        results[name] = [CLIP | settings, result[0].item(), result[1].tolist()]

    add("trl grpo", {"loss_type": "grpo"}, trl_loss(rows, "grpo"))
    add("trl dapo", {"loss_type": "dapo"}, trl_loss(rows, "dapo"))
    add("trl bnpo", {"loss_type": "dapo"}, trl_loss(rows, "bnpo"))
    add("trl dr_grpo", {"loss_type": "dr_grpo"}, trl_loss(rows, "dr_grpo"))
    add("trl cispo", {"loss_type": "cispo", "epsilon_high": 1.2}, trl_loss(rows, "cispo", epsilon_high=1.2))
    add("trl gspo", {"loss_type": "gspo"}, trl_loss(rows, "grpo", level="sequence"))
    add("trl delta", {"delta": 1.5}, trl_loss(rows, "dapo", delta=1.5))
    add("trl sapo", {"loss_type": "sapo", **TEMPERATURES}, trl_loss(rows, "sapo"))
    add("trl luspo", {"loss_type": "luspo"}, trl_loss(rows, "luspo", level="sequence"))
    add("trl vespo", {"loss_type": "vespo", **GAMMA}, trl_loss(rows, "vespo"))
    for mode, high, low in (("token_truncate", 1.3, None), ("token_mask", None, 0.1)):
        settings = {"loss_type": "vespo", **GAMMA, **correction_settings(mode, high, low)}
        add(f"trl vespo {mode}", settings, trl_loss(rows, "vespo", correction=trl_correction(rows, mode, high, low)))
    for threshold in (0.05, 0.2):
        name = f"trl off-policy mask {threshold}"
        add(name, {"off_policy_mask_threshold": threshold}, trl_loss(rows, "dapo", threshold=threshold))
    for share in (0.2, 0.5):
        settings = {"top_entropy_quantile": share, "entropy_coef": 0.05}
        result = trl_loss(rows, "dapo", top_entropy_quantile=share, entropy_coef=0.05)
        add(f"trl entropy of the highest {share}", settings, result)
    for name in ("dppo", "ipo"):
        settings = {"loss_type": name, "epsilon": 0.1, "epsilon_high": 0.1, "kl_tau": 0.01}
        if PRIME_RL is not None:
            add(f"prime-rl {name}", settings, prime_rl_loss(rows, name))
        else:
            results[f"prime-rl {name}"] = STORED["batches"][seed]["losses"][f"prime-rl {name}"]
    for unbiased in (True, False):
        settings = {"beta": 0.1, "use_bias_correction_kl": unbiased}
        add(f"trl kl, unbiased {unbiased}", settings, trl_loss(rows, "dapo", beta=0.1, unbiased=unbiased))
    add("trl entropy", {"entropy_coef": 0.05}, trl_loss(rows, "dapo", entropy_coef=0.05))
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        above, below = BOUNDS[mode.split("_")[0]]
        for high, low in ((above, None), (above, below), (None, below)):
            weights = trl_correction(rows, mode, high, low)
            settings = correction_settings(mode, high, low)
            add(f"trl {mode} {low} to {high}", settings, trl_loss(rows, "dapo", correction=weights))
    add("verl token-mean", {}, verl_loss(rows, "vanilla", "token-mean"))
    add("verl seq-mean-token-mean", {"loss_type": "grpo"}, verl_loss(rows, "vanilla", "seq-mean-token-mean"))
    norm = "seq-mean-token-sum-norm"
    add(f"verl {norm}", {"loss_type": "dr_grpo"}, verl_loss(rows, "vanilla", norm))
    add("verl dual clip", {"delta": 1.5}, verl_loss(rows, "vanilla", "token-mean", c=1.5))
    add("verl gspo", {"loss_type": "gspo"}, verl_loss(rows, "gspo", "seq-mean-token-mean"))
    cispo = verl_loss(rows, "cispo", "token-mean", low=1.0, high=0.2)
    add("verl cispo", {"loss_type": "cispo", "epsilon_high": 1.2}, cispo)
    for estimator in ("k2", "k3"):
        settings = {"beta": 0.1, "kl_estimator": estimator, "use_bias_correction_kl": False}
        add(f"verl {estimator}", settings, verl_loss(rows, "vanilla", "token-mean", kl=estimator))
    for level in ("token", "sequence"):
        above, below = BOUNDS[level]
        for mode, threshold, low in (("truncate", above, None), ("mask", f"{below}_{above}", below)):
            weights = verl_correction(rows, level, threshold)
            settings = correction_settings(f"{level}_{mode}", above, low)
            name = f"verl {level} {'icepop' if low else 'tis'}"
            add(name, settings, verl_loss(rows, "vanilla", "token-mean", correction=weights))
    return results


def kls(rows: dict[str, Tensor]) -> dict[str, Any]:
    """Return [values, gradients] by the name of VERL's estimate."""
    results: dict[str, Any] = {}
    for name in ("k1", "k2", "k3"):
        new = rows["logprobs"].clone().requires_grad_()
        values = core_algos.kl_penalty(new, rows["reference_logprobs"], name)
        results[name] = [values.tolist(), torch.autograd.grad(values.sum(), new)[0].tolist()]
    return results


def advantages(rows: dict[str, Tensor]) -> dict[str, Any]:
    """Return [arguments of `rollout_advantages`, advantages] by the name of the case."""
    results: dict[str, Any] = {
        f"trl {scale}": [{"scale_rewards": scale, "eps": 1e-4}, trl_advantages(scale)]
        for scale in ("group", "batch", "none")
    }
    for scale, norm in (("group", True), ("none", False)):
        theirs = verl_advantages(rows, "grpo", norm_adv_by_std_in_grpo=norm)
        results[f"verl grpo {scale}"] = [{"scale_rewards": scale}, theirs]
    config = SimpleNamespace(gamma=1.0)
    for name in ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        results[f"verl {name}"] = [{"advantage": name}, verl_advantages(rows, name, config=config)]
    return results


def overlong() -> list[float]:
    punish = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=4)
    return punish(completion_ids=[[0] * length for length in range(24)])


def everything() -> dict[str, Any]:
    batches = []
    for seed in (0, 1):
        rows = batch(seed)
        batches.append(
            {
                "rows": {
                    name: value.int().tolist() if name == "mask" else value.tolist() for name, value in rows.items()
                },
                "losses": losses(rows, seed),
                "kl": kls(rows),
                "advantages": advantages(rows),
            }
        )
    return {
        "versions": {"torch": torch.__version__, "trl": trl.__version__, "verl": verl.__version__},
        "constant_length": LENGTH,
        "rewards": REWARDS,
        "groups": GROUPS,
        "several": {
            "rewards": [REWARDS, SECOND],
            "weights": WEIGHTS,
            "trl": trl_advantages("group", "normalize_then_sum"),
        },
        "overlong": overlong(),
        "critic": [verl_critic(seed) for seed in (0, 1)],
        "batches": batches,
    }


def differences(stored: Any, new: Any, where: str = "") -> list[str]:
    """Return the places where two values differ by more than 1e-6."""
    if isinstance(stored, dict):
        names = sorted(stored.keys() | new.keys())
        return [d for n in names for d in differences(stored.get(n), new.get(n), f"{where}/{n}")]
    if isinstance(stored, list):
        same = isinstance(new, list) and len(stored) == len(new)
        pairs = zip(stored, new, strict=True) if same else []
        return [d for i, (a, b) in enumerate(pairs) for d in differences(a, b, f"{where}/{i}")] if same else [where]
    if isinstance(stored, float) and isinstance(new, int | float):
        return [] if abs(stored - new) <= 1e-6 else [f"{where}: {stored} is stored, the package says {new}"]
    return [] if stored == new else [f"{where}: {stored!r} is stored, found {new!r}"]


if __name__ == "__main__":
    golden, made = HERE / "golden.json", everything()
    if "--check" in sys.argv:
        wrong = differences(json.loads(golden.read_text()), json.loads(json.dumps(made)))
        print("\n".join(wrong) or f"golden.json is what {made['versions']} say")
        sys.exit(bool(wrong))
    golden.write_text(json.dumps(made) + "\n")
