"""Test support: VERL's own trainer on a CPU: a platform, and a rollout replica over transformers.

Loaded in every process of VERL by VERL_USE_EXTERNAL_MODULES.
"""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
import verl.utils.distributed as _distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


_nothing = _constant(None)
_device_module = types.ModuleType("torch_cpu_as_device")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("empty_cache", "synchronize", "set_device", "reset_peak_memory_stats", "ipc_collect"), _nothing),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), _nothing),
    **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated"), _constant(0)),
    "max_memory_reserved": _constant(0),
    "mem_get_info": _constant((1 << 34, 1 << 34)),
    "is_available": _constant(True),
    "device_count": _constant(1),
    "current_device": _constant("cpu"),
    "get_device_name": _constant("CPU"),
    "is_current_stream_capturing": _constant(False),
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
}
vars(_device_module).update(_FUNCTIONS)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = _device_module
    is_available = _constant(True)
    current_device = _constant(torch.device("cpu"))
    device_count = _constant(1)
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_device_capability = _constant((None, None))
    communication_backend_name = _constant("gloo")
    visible_devices_envvar = _constant("AGL_VISIBLE_SLOTS")
    nvtx_range = _constant(contextlib.nullcontext())
    ray_resource_name = _constant("GPU")  # ray.init(num_gpus=n): a slot, no device is touched
    ray_noset_envvars = _constant([])
    is_ipc_supported = _constant(False)


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

    async def resume(self, tags: Any) -> None: ...

    async def release(self) -> None: ...

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

    async def wake_up(self, *_: Any, **__: Any) -> None: ...

    sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = abort_all_requests = resume_generation = wake_up

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

    def _with_adapters(self, adapters: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
        """Return the weights W + s B A. Shapes: W (o, i), A (r, i), B (o, r)."""
        weights: dict[str, torch.Tensor] = {}
        for name, down in adapters.items():
            if name.endswith(".lora_A.weight"):
                up = adapters[name.replace(".lora_A.", ".lora_B.")]
                own = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
                weights[own] = self.base[own] + scale * up @ down
        assert 2 * len(weights) == len(adapters), sorted(adapters)[:3]
        return weights

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
                groups.setdefault((item[1].get("temperature", 1.0), item[1]["max_tokens"]), []).append(item)
            for (temperature, limit), items in groups.items():
                outputs = self._generate([item[0] for item in items], temperature, limit)
                for output, (_, _, future) in zip(outputs, items, strict=True):
                    future.set_result(output)

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], temperature: float, limit: int) -> list[TokenOutput]:
        width, ends = max(map(len, prompts)), self.model.generation_config.eos_token_id
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])  # (B, T)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        output = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=limit,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **(sampling if temperature else {"do_sample": False}),
        )
        drawn = output.sequences[:, width:]  # (B, R)
        logprobs = torch.stack(output.scores, 1).log_softmax(-1).gather(-1, drawn[..., None])[..., 0]
        outputs: list[TokenOutput] = []
        for tokens, own in zip(drawn.tolist(), logprobs.tolist(), strict=True):
            is_end = [token in (ends if isinstance(ends, list) else [ends]) for token in tokens]
            end = is_end.index(True) + 1 if any(is_end) else len(tokens)
            reason, extra = "completed" if any(is_end) else "length", {"global_steps": self.step}
            outputs.append(
                TokenOutput(token_ids=tokens[:end], log_probs=own[:end], stop_reason=reason, extra_fields=extra)
            )
        return outputs


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
