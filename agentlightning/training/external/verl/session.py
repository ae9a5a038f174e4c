"""VERL's run on a thread of its own, and the words that the loop exchanges with it."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import ray
from omegaconf import OmegaConf
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from agentlightning.training.external.verl.adapters import META, merge_adapters
from agentlightning.training.external.verl.bridge import Bridge, Part, Row
from agentlightning.training.external.verl.trainer import NAME, TaskRunner

logger = logging.getLogger(__name__)

_WAITING: Final = 1_000_000
"""Sessions that may wait for their rows at the same time."""
_END_SECONDS: Final = 60.0


class _KeptRunner:
    """What `run_ppo` takes as the class of its task runner: it makes one, and keeps it so that it can be ended."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._lock, self._is_over = threading.Lock(), False
        self.variables: dict[str, str] = {}
        """Of the environment of VERL's processes."""

    def remote(self) -> Any:
        with self._lock:
            if self._is_over:
                raise RuntimeError("the run was stopped before VERL began")
            runtime = {"env_vars": self.variables}
            self._handle = ray.remote(TaskRunner).options(num_cpus=1, runtime_env=runtime).remote()
            return self._handle

    def options(self, **settings: Any) -> _KeptRunner:
        return self

    def end(self) -> None:
        """End the runner, and with it all that it started; or keep it from beginning."""
        with self._lock:
            self._is_over = True
            if self._handle is not None:
                ray.kill(self._handle)


class VERLSession:
    """One `run_ppo`. Its methods belong to the loop of the run."""

    def __init__(self, config: Any, link: dict[str, Any], folder: Path, *, steps: int, held_out: int) -> None:
        """Complete the configuration.

        Args:
            link: what VERL's processes need to know of the run: names, lengths, end-of-sequence tokens.
            folder: for VERL's checkpoints.
            steps: of the whole run.
            held_out: tasks of an evaluation; 0 for none.
        """
        self.folder = folder
        name = f"agl-verl-{uuid4().hex}"
        per_step = config.data.train_batch_size
        every = config.trainer.save_freq if config.trainer.save_freq > 0 else steps
        self.saves_every = every
        self._config = OmegaConf.merge(
            config,
            {
                "agentlightning_link": {**link, "bridge": name, "namespace": "agentlightning"},
                "data": {"train_files": f"train:{steps * per_step}", "val_files": f"val:{max(1, held_out)}"},
                "trainer": {
                    "total_training_steps": steps,
                    "total_epochs": 1,
                    "save_freq": every,
                    "default_local_dir": str(folder),
                    "v1": {"trainer_mode": NAME},
                },
            },
        )
        self.name = name
        self._runner = _KeptRunner()
        self._owns_ray = False
        self._bridge: Any = None
        self._thread: threading.Thread | None = None
        self._up: Future[None] = Future()
        self._ended, self._left = threading.Event(), threading.Event()
        self.token = ""
        """What calls to the model must carry."""

    def start(self) -> None:
        """Join Ray, or start it here, and let VERL begin.

        Raises:
            ValueError: VERL refuses a setting.
        """
        config = self._config
        validate_config(
            config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
        )
        self._thread = threading.Thread(target=self._live, name="agl-verl", daemon=True)
        self._thread.start()
        self._up.result()

    def _live(self) -> None:
        """Be the thread of VERL, which lives until `stop`: Ray's processes end with the thread that started them."""
        try:
            self._runner.variables = {**get_ppo_ray_runtime_env(self._config)["env_vars"], "TRANSFER_QUEUE_ENABLE": "1"}
            if not ray.is_initialized():
                self._start_ray()
            told = {"agentlightning_link": {"node": ray.util.get_node_ip_address()}}
            self._config = OmegaConf.merge(self._config, told)
            options = {"name": self.name, "namespace": "agentlightning", "num_cpus": 0, "max_concurrency": _WAITING}
            self._bridge = ray.remote(Bridge).options(**options).remote()
            self.token = ray.get(self._bridge.token.remote())
        except BaseException as error:
            self._ended.set()
            self._up.set_exception(error)
            return
        self._up.set_result(None)
        if not self._left.is_set():
            self._run()
        self._left.wait()
        ray.kill(self._bridge)
        if self._owns_ray:
            ray.shutdown()

    def _start_ray(self) -> None:
        given: Any = OmegaConf.to_container(self._config.ray_kwargs.get("ray_init", {}), resolve=True)
        wanted = {"log_to_driver": False, "include_dashboard": False, **given}
        ray.init(**{name: value for name, value in wanted.items() if value is not None})
        self._owns_ray = True

    def _run(self) -> None:
        error = "VERL has ended"
        try:
            run_ppo(self._config, task_runner_class=self._runner)
        except BaseException as failure:
            cause = getattr(failure, "cause", None) or failure
            error = f"VERL ended with an error: {type(cause).__name__}: {cause}"
            logger.debug("VERL's run", exc_info=True)
        finally:
            self._ended.set()
            try:
                ray.get(self._bridge.end.remote(error))
            except ray.exceptions.RayError:
                logger.debug("the bridge is gone", exc_info=True)

    async def addresses(self) -> list[str]:
        """Return where the model is served.

        Raises:
            RuntimeError: VERL ended before.
        """
        return await _awaited(self._bridge.addresses.remote())

    async def known_addresses(self) -> list[str]:
        """Return where the model is served by now."""
        return await _awaited(self._bridge.known_addresses.remote())

    async def give(
        self, part: Part, step: int, rows: Sequence[Sequence[Sequence[Row]]], *, skips: bool = False
    ) -> None:
        """Give VERL the rows of a step, or of an evaluation after one; see `Bridge.give`."""
        await _awaited(self._bridge.give.remote(part, step, rows, skips))

    async def step(self, step: int) -> dict[str, Any]:
        """Return what VERL says of a step, once its weights are served.

        Raises:
            RuntimeError: VERL ended before.
        """
        return await _awaited(self._bridge.step.remote(step))

    def saved(self, step: int) -> Path | None:
        """Return VERL's checkpoint of a step, if there is one."""
        place = self.folder / f"global_step_{step}"
        return place if place.is_dir() else None

    def save_model(self, folder: Path) -> bool:
        """Copy the model of the newest checkpoint into a folder; says whether there is one."""
        return copy_newest_model(self.folder, folder)

    async def end(self) -> None:
        """Wait until VERL has ended by itself, as it does after its last step."""
        if not await asyncio.to_thread(self._ended.wait, _END_SECONDS):
            logger.warning("VERL does not end %d s after its last step; it is stopped", _END_SECONDS)

    def stop(self) -> None:
        """End what is left of VERL, and Ray if it was started here. May be called twice."""
        if self._thread is None:
            return
        self._left.set()
        if not self._ended.is_set():
            self._runner.end()
        self._thread.join(_END_SECONDS)
        self._thread = None


def copy_newest_model(checkpoints: Path, folder: Path) -> bool:
    """Copy the model of VERL's newest checkpoint, in transformers' form and with its adapters in the weights, into a
    folder; says whether there is one."""
    found = list(checkpoints.glob("global_step_*/actor/huggingface/*.safetensors"))
    if not found:
        return False
    newest = max(found, key=lambda path: path.stat().st_mtime)
    shutil.copytree(newest.parent, folder, dirs_exist_ok=True)
    if (about := newest.parents[1] / META).exists():
        told = json.loads(about.read_text())
        merge_adapters(folder, rank=told["r"], alpha=told["lora_alpha"])
    return True


async def _awaited(reference: Any) -> Any:
    """Return what a call of an actor gives, with the error of the actor itself."""
    try:
        return await asyncio.wrap_future(reference.future())
    except ray.exceptions.RayTaskError as error:
        raise RuntimeError(str(error.cause)) from None
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"Ray: {error}") from None
