"""HarborAgent: runs an agent of Harbor on a task of Harbor, and uses the verdict of its verifier as the reward."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast, get_args
from urllib.parse import urlsplit

from typing_extensions import override

from agentlightning.env_var import LightningEnvVar
from agentlightning.environments.harbor.harness import ApiFormat, agent_fields
from agentlightning.environments.harbor.package import Harbor, load_harbor, require_harbor
from agentlightning.environments.harbor.trial_folder import TrialFolder, remove_left_trials, trial_folder
from agentlightning.litagent.command.attempt_folder import attempt_resources, model_of
from agentlightning.litagent.command.sandbox import Bubblewrap, require_bubblewrap
from agentlightning.litagent.litagent import AgentFault, LitAgent
from agentlightning.semconv import RAW_SPAN
from agentlightning.types import LLM, AttemptedRollout, NamedResources, ProxyLLM, Rollout, RolloutRawResult
from agentlightning.utils.http.auth import is_loopback
from agentlightning.utils.setting_checks import check_choice, check_seconds

logger = logging.getLogger(__name__)

VerifierSandbox = Literal["separate", "task"]

POLICY_ERRORS = frozenset(
    {
        "ContextLengthExceededError",
        "ContextWindowExceededError",
        "OutputLengthExceededError",
        "OutputTokenExceededError",
    }
)
"""Exceptions of Harbor that a reply of the model caused, so that the verifier may still judge the attempt."""
_TASK_FIELDS = ("path", "name", "ref", "git_url", "git_commit_id")
_REGISTRY_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<ref>[\w.:-]+))?")
_COMPOSE_FAILED = re.compile(r"Docker compose command failed .*?Stdout: (.*?)\. Stderr: ", re.DOTALL)


class HarborFault(AgentFault, RuntimeError):
    """The trial has no verdict that measures the policy: the harness, its sandbox or the verifier failed."""

    reason = "trial_failed"


class NoVerdict(HarborFault):
    """The verifier returned no reward."""

    reason = "no_verdict"


class NoModelCall(HarborFault):
    """The harness ended without any call of the model."""

    reason = "no_call"


class HarborAgent(LitAgent[Any]):
    """Runs an agent of Harbor (a harness such as `mini-swe-agent`, `opencode` or `claude-code`) in a sandbox.

    ```python
    agent = agl.HarborAgent(agent="mini-swe-agent", environment="bwrap", tools=["/home/me/mini"])
    trainer.fit(agent, train_dataset=["tasks/mul", "tasks/sort"])
    ```

    A task is a folder in Harbor's format, a name in its registry (`org/name` or `org/name@ref`), or a row with `path`
    or `name`. The harness gets the attempt's address and key, so all of its model calls are recorded. Requires
    Python 3.12 or newer and `pip install 'agl-framework[harbor]'`.

    Only a verdict of the verifier is a reward. If the harness fails, times out or makes no model call, if the sandbox
    does not start, or if the verifier returns nothing, the attempt is an infrastructure fault.

    Args:
        agent: name of an agent of Harbor, or the fields of its `AgentConfig`. A class of your own (`import_path`) gets
            the model's name, and its address and key as the variables OPENAI_BASE_URL and OPENAI_API_KEY.
        environment: `bwrap` for a bubblewrap sandbox on this machine, the name of an environment of Harbor (`docker`,
            `podman`, `gke`, `daytona`, ...), `agl.Bubblewrap(...)`, or the fields of its `EnvironmentConfig`.
        llm: name of the model resource for the harness; the first by default.
        tools: folders on this machine with the harness, which a bubblewrap sandbox can read and run. Nothing is
            installed there. Other environments install the harness, or have it in their image
            (`agent={"name": ..., "kwargs": {"skip_install": True}}`).
        api_format: API that the harness calls, if it is not the usual one of this harness.
        verifier: `separate` judges in a second, new sandbox, into which only the working folder and `artifacts` are
            copied. `task` does what the task says, which is by default the sandbox of the agent; there, an agent can
            change what the verifier sees.
        artifacts: further files and folders for the second sandbox, by their paths in the first.
        reward_key: name of the reward, if the verifier returns several. The others become reward dimensions.
        policy_errors: names of exceptions of Harbor that do not prevent a reward.
        stop_seconds: seconds to end the sandbox when the attempt is cancelled.
        trials_dir: folder for the output of Harbor, which is otherwise deleted at the end of each attempt.
        trial: further fields of Harbor's `TrialConfig`.

    Raises:
        ImportError: Harbor is not installed, or Python is older than 3.12. Not raised on a machine that runs only the
            algorithm (AGL_CURRENT_ROLE=algorithm).
        TypeError, ValueError: a setting is invalid.
    """

    needs_resources = True

    def __init__(
        self,
        agent: str | Mapping[str, Any],
        environment: str | Bubblewrap | Mapping[str, Any] = "bwrap",
        *,
        llm: str | None = None,
        tools: Sequence[str | os.PathLike[str]] = (),
        api_format: ApiFormat | None = None,
        verifier: VerifierSandbox = "separate",
        artifacts: Sequence[str] = (),
        reward_key: str = "reward",
        policy_errors: Collection[str] = POLICY_ERRORS,
        stop_seconds: float = 30.0,
        trials_dir: str | os.PathLike[str] | None = None,
        trial: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if os.environ.get(LightningEnvVar.AGL_CURRENT_ROLE.value) != "algorithm":
            require_harbor()
        if api_format is not None:
            check_choice("api_format", api_format, get_args(ApiFormat))
        self.agent = _fields("agent", agent, "name")
        self.sandbox = (
            Bubblewrap() if environment == "bwrap" else environment if isinstance(environment, Bubblewrap) else None
        )
        """The settings of bubblewrap; None for another environment."""
        self.environment = {} if self.sandbox is not None else _fields("environment", environment, "type")
        self.llm = llm
        self.tools = _texts("tools", [os.fspath(tool) for tool in _listed("tools", tools)])
        if self.tools and self.sandbox is None:
            raise ValueError(
                "tools= is for environment='bwrap'. For another environment, put the harness into its image"
            )
        if relative := [tool for tool in self.tools if not os.path.isabs(tool)]:
            raise ValueError(f"tools must contain absolute paths; got {relative[0]!r}")
        self.api_format: ApiFormat | None = api_format
        self.verifier: VerifierSandbox = check_choice("verifier", verifier, get_args(VerifierSandbox))
        self.artifacts = _texts("artifacts", artifacts)
        self.reward_key = reward_key
        self.policy_errors = frozenset(_texts("policy_errors", policy_errors))
        self.stop_seconds = check_seconds("stop_seconds", stop_seconds)
        self.trials_dir = None if trials_dir is None else os.path.abspath(trials_dir)
        self.trial = dict(trial or {})
        self._warned_loopback = False
        if taken := sorted({"task", "agent", "environment", "trials_dir", "artifacts"} & set(self.trial)):
            raise ValueError(f"trial must not contain {', '.join(taken)}: HarborAgent has a parameter for it")

    @property
    def name(self) -> str:
        """Name of the harness, for messages."""
        return str(self.agent.get("name") or self.agent.get("import_path"))

    @override
    def set_runner(self, runner: Any) -> None:
        """Load Harbor and try the environment.

        Raises:
            ImportError: Harbor is not installed.
            RuntimeError: the environment cannot be used on this machine.
        """
        self.require_environment()
        super().set_runner(runner)

    def require_environment(self) -> None:
        """Raise an error if this machine lacks the programs or the credentials that the sandboxes need.

        Raises:
            ImportError: Harbor is not installed.
            RuntimeError: the environment cannot be used on this machine.
        """
        harbor = load_harbor()
        if self.sandbox is not None:
            require_bubblewrap()
            if missing := [tool for tool in self.tools if not os.path.isdir(tool)]:
                raise RuntimeError(f"tools: these folders do not exist on this machine: {', '.join(missing)}")
            return
        kind, path = self.environment.get("type"), self.environment.get("import_path")
        try:
            harbor.environments.run_preflight(kind, path, self.environment.get("kwargs"))
        except SystemExit as error:  # Harbor's way to end its own command
            raise RuntimeError(f"The environment {path or kind} cannot be used on this machine: {error}") from None

    @override
    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Run one trial.

        Raises:
            HarborFault: the trial has no verdict that measures the policy.
        """
        if not isinstance(rollout, AttemptedRollout):
            raise TypeError(f"HarborAgent requires a rollout with an attempt; got a {type(rollout).__name__}")
        model = model_of(attempt_resources(resources, rollout), self.llm)
        if model is None:
            raise ValueError("HarborAgent requires an LLM resource; the Trainer or the algorithm published none")
        await remove_left_trials()
        self._check_address(model)
        with trial_folder(rollout.attempt.attempt_id) as folder:
            result = await self.run_trial(task, model, folder)
            rewards = self.verdict(result)
            recorded = isinstance(model_of(resources, self.llm), ProxyLLM)  # the gateway records every call
            if recorded and not await self._has_called(rollout):
                said = await asyncio.to_thread(_last_words, Path(self.trials_dir or folder.trials) / result.trial_name)
                raise NoModelCall(f"The harness {self.name!r} ended without any call of the model{said}")
        return cast("RolloutRawResult", rewards)

    def _check_address(self, model: LLM) -> None:
        host = urlsplit(model.get_base_url()).hostname or ""
        if self.sandbox is None and is_loopback(host) and not self._warned_loopback:
            self._warned_loopback = True
            logger.warning(
                "The model is at %s, which only this machine can reach. For containers, let the gateway listen on an "
                "address of the machine: LLMProxy(host='0.0.0.0')",
                host,
            )

    async def run_trial(self, task: Any, model: LLM | None, folder: TrialFolder) -> Any:
        """Run one trial and return Harbor's `TrialResult`. If the call is cancelled, the sandbox is ended first.

        Args:
            task: a task as in a data set.
            model: the model for the harness; None for an agent of Harbor that calls none.
            folder: the folder of the trial.
        """
        harbor = load_harbor()
        fields = self._trial_fields(task, model, folder)
        separate = False
        if self.verifier == "separate":
            loaded = await harbor.load_task(fields["task"])
            separate = harbor.any_shared(loaded)
            if separate:
                fields["artifacts"] = [self._work_folder(loaded, harbor), *self.artifacts]
        trial = await harbor.trial.create(harbor.trial_config.model_validate(fields))
        if separate:
            for judged in (trial.task.config, *(trial.task.config.steps or [])):
                judged.verifier.environment_mode = harbor.separate
        if self.environment.get("type") == "podman" and _has_local_image(trial.task.config):
            trial.config.environment.delete = False
        folder.record(trial.config.model_dump(mode="json"))
        running = asyncio.ensure_future(trial.run())
        folder.kept = True  # until the trial has ended its sandbox; a second cancellation may prevent that
        try:
            result = await asyncio.shield(running)
            folder.kept = False
            if separate and not self._faults(result):
                steps = [trial.paths.step_artifacts_manifest_path(step.step_name) for step in result.step_results or []]
                for manifest in steps or [trial.paths.artifacts_manifest_path]:
                    _check_copied(manifest, fields["artifacts"])
            return result
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait({running}, timeout=self.stop_seconds)
            folder.kept = not running.done()
            if folder.kept:
                logger.error(
                    "the sandbox of trial %s did not end within %g s; the next attempt on this machine ends it",
                    *(trial.config.trial_name, self.stop_seconds),
                )
            raise
        except Exception:
            folder.kept = False
            raise

    def _trial_fields(self, task: Any, model: LLM | None, folder: TrialFolder) -> dict[str, Any]:
        environment = dict(self.environment)
        if self.sandbox is not None:
            urls = [] if model is None else [model.get_base_url()]
            environment = {
                "import_path": "agentlightning.environments.harbor.bubblewrap:BubblewrapEnvironment",
                "kwargs": {"folder": str(folder.path), "urls": urls, "tools": list(self.tools), **asdict(self.sandbox)},
            }
        return {
            **self.trial,
            "task": task_fields(task),
            "agent": agent_fields(self.agent, model, self.api_format, installs=self.sandbox is None),
            "environment": environment,
            "trials_dir": self.trials_dir or str(folder.trials),
            "artifacts": list(self.artifacts),
        }

    def _work_folder(self, task: Any, harbor: Harbor) -> str:
        config = task.config.environment
        found = config.workdir or harbor.dockerfile_workdir(task.paths.environment_dir / "Dockerfile")
        if found is None and self.sandbox is None and not self.artifacts:
            raise ValueError(
                f"The working folder of task {task.name} is unknown, which verifier='separate' copies. Set workdir in "
                "[environment] of its task.toml, set artifacts=, or use verifier='task'"
            )
        return found or (self.artifacts[0] if self.sandbox is None else "/app")

    def verdict(self, result: Any) -> dict[str, float]:
        """Return the rewards of a trial by name; `reward` is the one to train on.

        Args:
            result: Harbor's `TrialResult`.

        Raises:
            HarborFault: it has none that measures the policy.
        """
        if errors := self._faults(result):
            texts = "; ".join(f"{each.exception_type}: {_short(each.exception_message)}" for each in errors)
            raise HarborFault(f"Trial {result.trial_name}: {texts}")
        rewards = dict(result.verifier_result.rewards or {}) if result.verifier_result else {}
        if not rewards:
            raise NoVerdict(f"Trial {result.trial_name}: the verifier returned no reward")
        if self.reward_key in rewards:
            chosen = rewards.pop(self.reward_key)
        elif len(rewards) == 1:
            chosen = rewards.popitem()[1]
        else:
            raise NoVerdict(
                f"Trial {result.trial_name}: the verifier returned {', '.join(sorted(rewards))}, and none of them is "
                f"{self.reward_key!r}. Set reward_key= to one of them"
            )
        return {"reward": float(chosen), **{name: float(value) for name, value in rewards.items()}}

    def _faults(self, result: Any) -> list[Any]:
        return [each for each in result.recorded_exceptions() if each.exception_type not in self.policy_errors]

    async def _has_called(self, rollout: AttemptedRollout) -> bool:
        store = getattr(self.get_runner(), "store", None)
        if store is None:
            return True
        ids = (rollout.rollout_id, rollout.attempt.attempt_id)
        return bool(await store.query_spans(*ids, name=RAW_SPAN, limit=1))


def _has_local_image(task: Any) -> bool:
    """Return whether a task names an image that podman-compose would remove together with the container."""
    judged = (task, *(task.steps or []))
    environments = (task.environment, *(each.verifier.environment for each in judged))
    return any(str(each.docker_image).startswith("localhost/") for each in environments if each is not None)


def _check_copied(manifest: Path, required: Collection[str]) -> None:
    """Raise HarborFault unless each path was copied to the verifier, which would otherwise judge untouched files."""
    entries = json.loads(manifest.read_bytes()) if manifest.exists() else []
    copied = {each["source"] for each in entries if each["status"] in ("ok", "skipped")}
    if missing := [path for path in required if path not in copied]:
        raise HarborFault(f"The verifier did not get {', '.join(missing)}, which could not be copied from the sandbox")


def _short(message: str) -> str:
    """Return the end of an error; of a command of compose, only what it has printed as errors."""
    printed = _COMPOSE_FAILED.match(message)
    if printed is None:
        return message.strip()[-600:]
    lines = [line for line in printed[1].strip().splitlines() if "level=warning" not in line]
    return "\n".join(lines)[-300:] or message.strip()[-600:]


def _last_words(trial: Path) -> str:
    """Return the end of the newest text that the harness has written, for an error message."""
    texts = [path for path in (trial / "agent").glob("*.txt") if path.stat().st_size > 0]
    if not texts:
        return ""
    newest = max(texts, key=lambda path: path.stat().st_mtime)
    return f". The end of its {newest.name}: {newest.read_text(errors='replace').strip()[-600:]}"


def task_fields(task: object) -> dict[str, Any]:
    """Return the fields of Harbor's `TaskConfig` for a task of a data set.

    Raises:
        TypeError, ValueError: it names no task.
    """
    if isinstance(task, os.PathLike):
        task = os.fspath(cast("os.PathLike[str]", task))
    if isinstance(task, str):
        if os.path.isdir(task):
            task = {"path": task}
        elif (named := _REGISTRY_NAME.fullmatch(task)) is not None:
            task = {name: value for name, value in named.groupdict().items() if value is not None}
        else:
            raise ValueError(f"The task {task!r} is neither a folder on this machine nor a name such as org/name")
    if not isinstance(task, Mapping):
        raise TypeError(f"A task must be a folder, a name in Harbor's registry or a row with them; got {task!r}")
    row = cast("Mapping[str, Any]", task)
    fields = {name: row[name] for name in _TASK_FIELDS if row.get(name) is not None}
    if "path" not in fields and "name" not in fields:
        raise ValueError(f"A row of a task must have the field path or name; it has {', '.join(row) or 'none'}")
    if "path" in fields and "git_url" not in fields:
        fields["path"] = os.path.abspath(fields["path"])
        if not os.path.isfile(os.path.join(fields["path"], "task.toml")):
            raise ValueError(f"The task folder {fields['path']} has no task.toml")
    return fields


# --- settings --------------------------------------------------------------------------------------------------------


def _fields(setting: str, value: object, field: str) -> dict[str, Any]:
    if isinstance(value, str) and value:
        return {field: value}
    if isinstance(value, Mapping) and value:
        return dict(cast("Mapping[str, Any]", value))
    raise TypeError(f"{setting} must be a name or a mapping with the fields of Harbor's configuration; got {value!r}")


def _listed(setting: str, values: Any) -> list[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Collection):
        raise TypeError(f"{setting} must be a list; got {values!r}")
    return list(cast("Collection[Any]", values))


def _texts(setting: str, values: object) -> tuple[str, ...]:
    listed = _listed(setting, values)
    if wrong := [value for value in listed if not isinstance(value, str)]:
        raise TypeError(f"{setting} must contain strings; got {wrong[0]!r}")
    return tuple(listed)
