"""VERL's run on its own thread, and the calls to the bridge with which the loop of the run controls it."""

from __future__ import annotations

import logging
import secrets
import threading
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

from agentlightning.training.external.verl.bridge import Bridge
from agentlightning.training.external.verl.trainer import NAME, TaskRunner

logger = logging.getLogger(__name__)

_MAX_WAITING: Final = 1_000_000
"""Maximum number of sessions that wait for their rows concurrently."""
_END_SECONDS: Final = 60.0
_NAMESPACE: Final = "agentlightning"


class _Runner:
    """A task runner class for `run_ppo` that creates a runner and keeps it so that it can be ended."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._lock, self._is_over = threading.Lock(), False
        self.variables: dict[str, str] = {}
        """Environment variables of VERL's processes."""

    def options(self, **settings: Any) -> _Runner:
        return self

    def remote(self) -> Any:
        with self._lock:
            if self._is_over:
                raise RuntimeError("the run was stopped before VERL began")
            options = {"num_cpus": 1, "runtime_env": {"env_vars": self.variables}}
            self._handle = ray.remote(TaskRunner).options(**options).remote()
            return self._handle

    def end(self) -> None:
        """Stop the runner and all processes that it started; if it has not started, prevent its start."""
        with self._lock:
            self._is_over = True
            if self._handle is not None:
                ray.kill(self._handle)


class VERLSession:
    """One `run_ppo`."""

    def __init__(self, config: Any, link: dict[str, Any], folder: Path, *, steps: int, held_out: int) -> None:
        """Complete the configuration for a number of steps and of held-out tasks (0 for none).

        `link` is passed to VERL's processes: `served` has the fields of `ServedAs`, `tells_tokens`: send token values.
        """
        self.name = f"agl-verl-{uuid4().hex}"
        """Unique to this start of the run."""
        self.token = secrets.token_urlsafe(32)
        """Token for calls to the model."""
        self.saves_every = config.trainer.save_freq if config.trainer.save_freq > 0 else steps
        """Steps between two checkpoints of VERL."""
        self.folder = folder
        """Folder of VERL's checkpoints."""
        self._config = OmegaConf.merge(
            config,
            {
                "agentlightning_link": {**link, "bridge": self.name, "namespace": _NAMESPACE, "node": ""},
                "data": {
                    "train_files": f"train:{steps * config.data.train_batch_size}",
                    "val_files": f"val:{max(1, held_out)}",
                },
                "trainer": {
                    "total_training_steps": steps,
                    "total_epochs": 1,
                    "save_freq": self.saves_every,
                    "default_local_dir": str(folder),
                    "v1": {"trainer_mode": NAME},
                },
            },
        )
        self._runner = _Runner()
        self._bridge: Any = None
        self._thread: threading.Thread | None = None
        self._up: Future[None] = Future()
        self._ended, self._stopped = threading.Event(), threading.Event()

    def start(self) -> None:
        """Connect to Ray, or start it here, and start VERL.

        Raises:
            ValueError: VERL rejects a setting.
        """
        config = self._config
        validate_config(
            config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
        )
        self._thread = threading.Thread(target=self._run, name="agl-verl", daemon=True)
        self._thread.start()
        self._up.result()

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the bridge and wait for its result.

        Raises:
            RuntimeError: VERL has ended, or Ray failed.
        """
        try:
            return ray.get(getattr(self._bridge, method).remote(*arguments))
        except ray.exceptions.RayTaskError as error:
            raise RuntimeError(str(error.cause)) from None
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"Ray: {error}") from None

    def checkpoint(self, step: int) -> Path | None:
        """Return VERL's checkpoint of a step, or None."""
        place = self.folder / f"global_step_{step}"
        return place if place.is_dir() else None

    def wait_for_end(self) -> None:
        """Wait until VERL exits by itself, as it does after its last step."""
        if not self._ended.wait(_END_SECONDS):
            logger.warning("VERL did not exit within %d s after its last step; stopping it", _END_SECONDS)

    def stop(self) -> None:
        """End VERL, and Ray if it was started here. May be called twice."""
        if self._thread is None:
            return
        self._stopped.set()
        if not self._ended.is_set():
            self._runner.end()
        self._thread.join(_END_SECONDS)
        self._thread = None

    def _run(self) -> None:
        """Run VERL, and wait for `stop`: Ray's processes end with the thread that started them."""
        owns_ray = not ray.is_initialized()
        try:
            self._runner.variables = {**get_ppo_ray_runtime_env(self._config)["env_vars"], "TRANSFER_QUEUE_ENABLE": "1"}
            if owns_ray:
                _start_ray(self._config)
            self._config.agentlightning_link.node = ray.util.get_node_ip_address()
            options = {"name": self.name, "namespace": _NAMESPACE, "num_cpus": 0, "max_concurrency": _MAX_WAITING}
            self._bridge = ray.remote(Bridge).options(**options).remote(self.token)
        except BaseException as error:
            self._ended.set()
            self._up.set_exception(error)
            return
        self._up.set_result(None)
        if not self._stopped.is_set():
            self._train()
        self._stopped.wait()
        ray.kill(self._bridge)
        if owns_ray:
            ray.shutdown()

    def _train(self) -> None:
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
                logger.debug("the bridge actor has ended", exc_info=True)


def _start_ray(config: Any) -> None:
    settings: Any = OmegaConf.to_container(config.ray_kwargs.get("ray_init", {}), resolve=True)
    settings = {"log_to_driver": False, "include_dashboard": False, **settings}
    ray.init(**{name: value for name, value in settings.items() if value is not None})
