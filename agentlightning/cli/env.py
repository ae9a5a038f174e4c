"""`agl env`: environments that agents can be trained in: which are installed, and a try of one with a model."""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import random
import shutil
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import typer

from agentlightning.base.terminal import counted, some_lines
from agentlightning.cli.export import trained_at
from agentlightning.cli.output import JSON, log_to_stderr, number, say, shortened, show_json, show_table
from agentlightning.cli.rollouts import conversation_of, end_of, texts_of
from agentlightning.errors import BadRequestError, did_you_mean

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.training.rollouts import Evidence
    from agentlightning.types import Rollout

app = typer.Typer(no_args_is_help=True)
_SECONDS_TO_ANSWER = 5.0
"""Seconds within which a model server must list its models."""
_LINES = 12
"""Maximum number of lines of a message."""
_OWN = "FILE.py:OBJECT"


class Environment(NamedTuple):
    """An environment in the list."""

    name: str
    """The NAME of `agl env try`; words in capitals are values."""
    about: str
    package: str
    """Its distribution on PyPI; empty if it needs none."""
    install: str
    """The arguments of `pip install`."""

    @property
    def version(self) -> str | None:
        """The installed version; None if the package is not installed."""
        found = importlib.metadata.distributions(name=self.package) if self.package else ()
        return next((each.version for each in found), None)

    @property
    def state(self) -> str:
        """The version, or the command that installs the package."""
        missing = f"not installed: pip install {self.install}"
        return (self.version or missing) if self.package else "part of this package"


_EXTRA = "'agl-framework[{}]'"
ENVIRONMENTS = (
    Environment("reasoning-gym:DATASET", "generated tasks", "reasoning-gym", _EXTRA.format("reasoning-gym")),
    Environment("harbor:FOLDER", "tasks in sandboxes, for harnesses", "harbor", _EXTRA.format("harbor")),
    Environment(_OWN, "agent and tasks of your own", "", ""),
    Environment("gymnasium", "text spaces: docs/how-to/gymnasium.md", "gymnasium", "gymnasium"),
    Environment("inspect", "tasks of Inspect: examples/inspect", "inspect-ai", "inspect-ai"),
    Environment("openenv", "servers of OpenEnv: examples/openenv", "openenv", "openenv"),
    Environment("textworld", "text games: examples/textworld", "textworld", "textworld"),
    Environment("verifiers", "environments of verifiers: examples/verifiers", "verifiers", "verifiers"),
)
_BY_NAME = {each.name.partition(":")[0]: each for each in ENVIRONMENTS if each.name != _OWN}


@app.callback()
def env() -> None:
    """List the environments for agents, and try one with a model.

    Example: agl env try reasoning-gym:chain_sum --model http://127.0.0.1:8000/v1
    """


@app.command("list")
def list_environments(
    name: str | None = typer.Argument(None, metavar="[reasoning-gym]", help="List the data sets of this environment"),
    as_json: bool = JSON,
) -> None:
    """List the environments and their installed versions, or the data sets of one.

    Example: agl env list reasoning-gym
    """
    if name is not None:
        from agentlightning.environments.gym import data_sets

        if name != "reasoning-gym":
            raise BadRequestError(f"Expected reasoning-gym; got {name!r}{did_you_mean(name, _BY_NAME)}")
        names = [f"{name}:{each}" for each in data_sets()]
        show_json(names) if as_json else show_table(("name",), [(each,) for each in names])
        return
    if as_json:
        show_json([{**each._asdict(), "version": each.version} for each in ENVIRONMENTS])
        return
    show_table(("name", "environment", "installed"), [(each.name, each.about, each.state) for each in ENVIRONMENTS])


@app.command("try")
def try_environment(
    name: str = typer.Argument(metavar="NAME", help="reasoning-gym:DATASET, harbor:FOLDER, or FILE.py:OBJECT"),
    model: str = typer.Option(help="Base URL of a model server, or the folder of a checkpoint, run or model"),
    model_name: str | None = typer.Option(None, help="Name of the model on the server; its only model by default"),
    api_key: str | None = typer.Option(None, help="Name of the environment variable that holds the server's API key"),
    tasks: int = typer.Option(3, min=1, help="Number of tasks to run"),
    seed: int | None = typer.Option(None, help="Seed that selects the tasks; the first ones by default"),
    dataset: str | None = typer.Option(
        None, help="Tasks for an agent of your own: a .jsonl, .json or .parquet file, or module:object"
    ),
    harness: str = typer.Option("mini-swe-agent", help="Harness for Harbor's tasks: a name, or module:Class"),
    environment: str = typer.Option("bwrap", help="Sandbox for Harbor's tasks: bwrap, docker, podman, ..."),
    tools: list[str] = typer.Option([], help="Folder that a bwrap sandbox can read; may be repeated"),
    temperature: float | None = typer.Option(None, help="Temperature of replies; that of the server by default"),
    max_tokens: int | None = typer.Option(None, min=1, help="Maximum length of a reply in tokens"),
    full: bool = typer.Option(False, "--full", help="Print whole messages instead of their first lines"),
    store: str = typer.Option("memory", help="Store that keeps the rollouts: a file; by default, they are not kept"),
    log_level: str = typer.Option("ERROR", help="DEBUG, INFO, WARNING or ERROR"),
    as_json: bool = JSON,
) -> int:
    """Run a few tasks of an environment with a model, and print each conversation and its reward.

    OBJECT is an agent and its tasks (a tuple, such as that of agl.tasks_from), a function without parameters that
    returns them, or only an agent, which needs --dataset. Exit code 1 if a task has no reward.

    Example: agl env try reasoning-gym:chain_sum --model http://127.0.0.1:8000/v1
    """
    from agentlightning.cli.plan import in_foreground

    log_to_stderr(log_level, json_lines=False)
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    report = _Report(name, tasks, full=full, as_json=as_json)

    def work() -> None:
        agent, all_tasks = _agent_and_tasks(name, dataset, tasks, seed, (harness, environment, tools))
        places = range(min(tasks, len(all_tasks)))
        if seed is not None and not name.startswith("reasoning-gym:"):  # that generates as many as needed
            places = random.Random(seed).sample(range(len(all_tasks)), len(places))
        report.count = len(places)
        with _served(model, model_name, api_key) as entry:
            _run(agent, [all_tasks[place] for place in places], entry, sampling, store, report)

    return in_foreground(work) or report.end()


# --- the environment -------------------------------------------------------------------------------------------------


def _agent_and_tasks(
    name: str, dataset: str | None, count: int, seed: int | None, harbor: tuple[str, str, list[str]]
) -> tuple[object, Any]:
    """Return the agent of an environment, and its tasks."""
    from agentlightning.cli.plan import is_target

    kind, _, rest = name.partition(":")
    if kind in _BY_NAME and dataset is not None:
        raise BadRequestError(f"--dataset is only for an agent of your own ({_OWN}); {kind} has its own tasks")
    if kind == "reasoning-gym":
        from agentlightning.environments.gym import ReasoningGymAgent, reasoning_gym

        if not rest:
            raise BadRequestError(
                "Name a data set, such as reasoning-gym:chain_sum. List them: agl env list reasoning-gym"
            )
        return ReasoningGymAgent(), reasoning_gym(rest, size=count, seed=seed or 0)
    if kind == "harbor":
        from agentlightning.environments.harbor.agent import HarborAgent
        from agentlightning.environments.harbor.tasks import task_folders

        harness, environment, tools = harbor
        folders = task_folders(Path(rest or ".").absolute())
        harness_fields = {"import_path": harness} if is_target(harness) else {"name": harness}
        return HarborAgent(harness_fields, environment, tools=tools), [str(folder) for folder in folders]
    if kind in _BY_NAME:
        known = _BY_NAME[kind]
        raise BadRequestError(
            f"{kind} needs an agent: see {known.about.split()[-1]}, and pass it as {_OWN} ({known.state})"
        )
    if not is_target(name):
        near = f"; for tasks of Harbor, use harbor:{name}" if Path(name).is_dir() else did_you_mean(kind, _BY_NAME)
        raise BadRequestError(f"No environment {name!r}{near}. Expected one of {', '.join(_BY_NAME)}, or {_OWN}")
    return _own(name, dataset)


def _own(name: str, dataset: str | None) -> tuple[object, Any]:
    """Return an agent of the user, and its tasks."""
    from agentlightning.cli.plan import load_dataset, load_target
    from agentlightning.trainer.datasets import as_dataset

    try:
        value: Any = load_target("NAME", name)
    except BadRequestError as error:
        raise BadRequestError(f"{error}{did_you_mean(name.partition(':')[0], _BY_NAME)}") from None
    if inspect.isfunction(value) and not inspect.signature(value).parameters:
        value = value()
    if isinstance(value, type):
        value = value()
    if isinstance(value, tuple):
        pair = cast("tuple[Any, ...]", value)
        if len(pair) != 2 or dataset is not None:
            raise BadRequestError(
                f"{name} must be (agent, tasks), without --dataset; got a tuple of {len(pair)} values"
            )
        agent, tasks = pair
    elif dataset is None:
        raise BadRequestError(f"{name} is an agent without tasks. Add --dataset tasks.jsonl, or use (agent, tasks)")
    else:
        agent, tasks = value, load_dataset("--dataset", dataset)
    found = as_dataset("the dataset", tasks)
    if found is None or len(found) == 0:
        raise BadRequestError(f"{name} has no tasks: the dataset is empty")
    return agent, found


# --- the model -------------------------------------------------------------------------------------------------------


@contextmanager
def _served(model: str, name: str | None, api_key: str | None) -> Generator[dict[str, Any]]:
    """Yield the gateway's entry of a model, which is served by its URL or, from a folder, by this process."""
    if model.startswith(("http://", "https://")):
        key = {} if api_key is None else {"api_key": f"os.environ/{api_key}"}
        name = asyncio.run(_name_at(model.rstrip("/"), name, api_key))
        # The prefix is removed, so that a name such as openai/gpt-oss-20b keeps its own.
        yield {"model_name": name, "litellm_params": {"model": f"hosted_vllm/{name}", "api_base": model, **key}}
        return
    if api_key is not None or name is not None:
        raise BadRequestError(f"--api-key and --model-name require the URL of a model server; got --model {model!r}")
    if not Path(model).is_dir():
        raise BadRequestError(f"--model {model!r} is neither a URL, such as http://127.0.0.1:8000/v1, nor a folder")
    checkpoint = trained_at(model, "agl.db")
    from agentlightning.engine.engine import InferenceEngine

    engine = InferenceEngine(checkpoint.load(), model_name="policy")
    engine.start()
    try:
        parameters = {"model": "policy", "api_base": engine.base_url, "engine": "agentlightning"}
        yield {"model_name": "policy", "litellm_params": parameters}
    finally:
        engine.stop()


async def _name_at(url: str, name: str | None, api_key: str | None) -> str:
    """Return the name of the model at a URL, after a request that shows whether the server answers."""
    import aiohttp

    from agentlightning.base.process_secrets import secret

    key = None if api_key is None else secret(api_key)
    if api_key is not None and not key:
        raise BadRequestError(f"--api-key {api_key}: the environment variable is not set")
    timeout, headers = aiohttp.ClientTimeout(total=_SECONDS_TO_ANSWER), {"authorization": f"Bearer {key}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers if key else {}) as session,
            session.get(f"{url}/models") as response,
        ):
            status = response.status
            listed: Any = await response.json(content_type=None) if status == 200 else {}
            names = [str(each["id"]) for each in listed.get("data") or ()]
    except (aiohttp.ClientError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        why = f"it did not answer within {_SECONDS_TO_ANSWER:g} s" if isinstance(error, TimeoutError) else error
        raise BadRequestError(f"--model {url}: no model server answers there: {why}") from None
    if status in (401, 403):
        raise BadRequestError(f"--model {url}: the server refuses the key (status {status}). Set --api-key VARIABLE")
    if name is None and len(names) != 1:
        found = f"lists the models {', '.join(names[:10])}" if names else f"lists no models (status {status})"
        hint = "" if names or url.endswith("/v1") else f", or use --model {url}/v1"
        raise BadRequestError(f"--model {url}: the server {found}. Set --model-name{hint}")
    return name or names[0]


# --- the rollouts ----------------------------------------------------------------------------------------------------


def _run(agent: Any, tasks: Sequence[Any], entry: Any, sampling: dict[str, Any], store: str, report: _Report) -> None:
    """Run the tasks in order, as in a training run, and report each when it ends."""
    from agentlightning.algorithm.decorator import algo
    from agentlightning.algorithm.evaluator import ROLLOUT_SECONDS
    from agentlightning.llm_proxy import LLMProxy
    from agentlightning.store.spec import spec_of
    from agentlightning.trainer import Trainer
    from agentlightning.training.rollouts import collect
    from agentlightning.types import EnqueueRolloutRequest, RolloutConfig

    parameters = {name: value for name, value in sampling.items() if value is not None}

    @algo(auto_start_proxy=True)
    async def in_order(*, store: LightningStore, llm_proxy: LLMProxy) -> None:
        llm = llm_proxy.as_resource(model=entry["model_name"], sampling_parameters=parameters)
        resources_id = (await store.add_resources({"main_llm": llm})).resources_id
        limits = RolloutConfig(timeout_seconds=ROLLOUT_SECONDS)
        for task in tasks:
            request = EnqueueRolloutRequest(input=task, mode="val", resources_id=resources_id, config=limits)
            [rollout] = await collect(store, [request], timeout_seconds=2 * ROLLOUT_SECONDS)
            await report.add(store, rollout)

    proxy = LLMProxy(model_list=[entry])
    trainer = Trainer(algorithm=in_order, llm_proxy=proxy, strategy="shm", store=spec_of(store), progress="none")
    try:
        trainer.fit(agent)
    finally:
        asyncio.run(trainer.store.close())


class _Report:
    """Prints the rollouts, and keeps their rewards for the last line."""

    def __init__(self, name: str, count: int, *, full: bool, as_json: bool) -> None:
        self.name, self.count, self.full, self.as_json = name, count, full, as_json
        self.records: list[dict[str, Any]] = []
        self.width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 200

    async def add(self, store: LightningStore, rollout: Rollout) -> None:
        """Print a rollout that has ended."""
        from agentlightning.store.http.redaction import hidden
        from agentlightning.training.rollouts import evidence

        found = await evidence(store, rollout)
        conversation, reward = conversation_of(found.counted), found.reward
        task, error = hidden(rollout.input), hidden(_error_of(found))
        self.records.append(
            {"rollout_id": rollout.rollout_id, "task": task, "reward": reward, "error": error, "messages": conversation}
        )
        if self.as_json:
            return
        say(shortened(f"--- task {len(self.records)} of {self.count}: {task}", self.width))
        for call, messages in enumerate(conversation, start=1):
            if call > 1 and messages:  # none if a client repeats a failed call
                say(f"--- model call {call}")
            for text in texts_of(messages):
                say(self._fitted(text), lines=True)
        why = "" if error is None else f" ({error})"
        say(self._fitted(f"no reward{why}" if reward is None else f"reward: {number(reward)}{why}"), lines=True)

    def end(self) -> int:
        """Print the last line and return the exit code."""
        rewards = [each["reward"] for each in self.records if each["reward"] is not None]
        mean = sum(rewards) / len(rewards) if rewards else None
        if self.as_json:
            show_json({"environment": self.name, "mean_reward": mean, "rollouts": self.records})
        else:
            failed = f", {self.count - len(rewards)} without a reward" if len(rewards) < self.count else ""
            say(f"{counted(self.count, 'task')}: mean reward {'-' if mean is None else f'{mean:.3f}'}{failed}")
        return 0 if len(rewards) == self.count else 1

    def _fitted(self, text: str) -> str:
        """Return the first lines of a text, and its length if it is cut."""
        shown = "\n".join(some_lines(text).split("\n")[:_LINES])[: _LINES * self.width]
        return text if self.full or len(shown) >= len(text) else f"{shown} ... ({len(text)} characters)"


def _error_of(found: Evidence) -> str | None:
    """Return why an attempt has no reward, or the failure of the policy that the reward is for."""
    if found.latest is None:
        return found.rollout.status
    if found.latest.error is not None:
        return f"{end_of(found.latest)}: {found.latest.error.type}: {found.latest.error.message}"
    return None if found.reward is not None else end_of(found.latest)
