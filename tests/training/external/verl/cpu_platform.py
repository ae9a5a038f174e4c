"""Test support: VERL's own trainer on a CPU: a platform, and a rollout replica over transformers.

Loaded in every process of VERL by VERL_USE_EXTERNAL_MODULES.
"""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import Generator
from typing import Any

import torch
import verl.utils.distributed as _distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

_module = types.ModuleType("torch_cpu_as_device")
for _name in ("empty_cache", "synchronize", "set_device", "reset_peak_memory_stats", "ipc_collect", "manual_seed"):
    setattr(_module, _name, lambda *args, **kwargs: None)
for _name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
    setattr(_module, _name, lambda *args, **kwargs: 0)
_told: dict[str, Any] = {
    "manual_seed_all": lambda seed: None,
    "mem_get_info": lambda *args: (1 << 34, 1 << 34),
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: "cpu",
    "get_device_name": lambda *args: "CPU",
    "is_current_stream_capturing": lambda: False,
    "get_rng_state": lambda *args: torch.get_rng_state(),
    "set_rng_state": lambda state, *args: torch.set_rng_state(state),
}
for _name, _value in _told.items():
    setattr(_module, _name, _value)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _module

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "AGL_VISIBLE_SLOTS"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Generator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # ray.init(num_gpus=n): a slot, no device is touched

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...


# gloo alone: verl asks for "cpu:gloo,<device>:<backend>", which names the cpu twice here
_initialize = _distributed.initialize_global_process_group_ray
_distributed.initialize_global_process_group_ray = lambda timeout_second=None, backend=None: _initialize(
    timeout_second, backend or "cpu:gloo"
)
_ROLLOUT_REGISTRY["hfcpu", "async"] = f"{__name__}.CPUAdapter"
RolloutReplicaRegistry.register("hfcpu", lambda: CPUReplica)


def _server() -> Any:
    import ray

    return ray.get_actor("hfcpu_server_0")


class CPUAdapter(BaseRollout):
    """Lives beside the trained weights; hands them to the server of its replica."""

    async def resume(self, tags: Any) -> None:
        await _server().wake_up.remote()

    async def release(self) -> None:
        await _server().sleep.remote()

    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = False,
        **settings: Any,
    ) -> None:
        state = {name: tensor.detach().to(torch.float32).clone() for name, tensor in weights}
        scale = peft_config["lora_alpha"] / peft_config["r"] if peft_config and base_sync_done else None
        await _server().load.remote(state, global_steps, scale)


class CPUServer:
    """Token in, token out, by transformers on the CPU; calls that are there together are decoded together."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        self.model = loaded.eval()
        self.base = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
        self.step = 0
        self.waiting: list[tuple[list[int], dict[str, Any], asyncio.Future[TokenOutput]]] = []
        self.task: asyncio.Task[None] | None = None

    async def wake_up(self, tags: Any = None) -> None: ...

    async def sleep(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def abort_all_requests(self, reject_request: bool = False) -> None: ...

    async def resume_generation(self) -> None: ...

    async def load(
        self, state: dict[str, torch.Tensor], global_steps: int | None, adapters: float | None = None
    ) -> None:
        """Take the weights, or with `adapters`, their scale, what adapters add to those that were taken before."""
        if adapters is None:
            state = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items()}
            self.base.update(state)
        else:
            state = self._with_adapters(state, adapters)
        missing = self.model.load_state_dict(state, strict=False)
        assert not missing.unexpected_keys, missing.unexpected_keys[:3]
        if global_steps is not None:
            self.step = global_steps

    def _with_adapters(self, given: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
        """Return the weights W + s B A. Shapes: W (o, i), A (r, i), B (o, r)."""
        found: dict[str, torch.Tensor] = {}
        for name, down in given.items():
            if name.endswith(".lora_A.weight"):
                up = given[name.replace(".lora_A.", ".lora_B.")]
                own = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
                found[own] = self.base[own] + scale * up @ down
        assert 2 * len(found) == len(given), sorted(given)[:3]
        return found

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **others: Any
    ) -> TokenOutput:
        future: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        self.waiting.append((list(prompt_ids), dict(sampling_params), future))
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._drain())
        return await future

    async def _drain(self) -> None:
        while self.waiting:
            await asyncio.sleep(0.005)
            batch, self.waiting = self.waiting[:64], self.waiting[64:]
            groups: dict[tuple[float, int], list[Any]] = {}
            for item in batch:
                key = item[1].get("temperature", 1.0), item[1]["max_tokens"]
                groups.setdefault(key, []).append(item)
            for (temperature, limit), items in groups.items():
                outputs = self._generate([item[0] for item in items], temperature, limit)
                for (ids, logprobs, reason), item in zip(outputs, items, strict=True):
                    extra = {"global_steps": self.step}
                    item[2].set_result(
                        TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason=reason, extra_fields=extra)
                    )

    @torch.no_grad()
    def _generate(
        self, prompts: list[list[int]], temperature: float, limit: int
    ) -> list[tuple[list[int], list[float], str]]:
        ends = self.model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])  # (B, T)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        past, count = None, len(prompts)
        found: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        done = [False] * count
        for _ in range(limit):
            output = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=past, use_cache=True
            )
            past = output.past_key_values
            of_next = torch.log_softmax(output.logits[:, -1].float() / (temperature or 1.0), -1)  # (B, V)
            drawn = of_next.argmax(-1) if temperature == 0 else torch.multinomial(of_next.exp(), 1)[:, 0]
            for row in range(count):
                if not done[row]:
                    token = int(drawn[row])
                    found[row].append(token)
                    logprobs[row].append(float(of_next[row, token]))
                    done[row] = token in ends
            if all(done):
                break
            ids, positions = drawn[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones(count, 1, dtype=mask.dtype)], 1)
        told = ["completed" if over else "length" for over in done]
        return list(zip(found, logprobs, told, strict=True))


class CPUReplica(RolloutReplica):
    async def launch_servers(self) -> None:
        import ray

        options = {"name": f"hfcpu_server_{self.replica_rank}", "num_cpus": 0, "max_concurrency": 1000}
        server = ray.remote(CPUServer).options(**options).remote(self.model_config["path"])
        await server.wake_up.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"hfcpu-{self.replica_rank}"

    def rollout_worker_use_gpu(self) -> bool:
        return True
