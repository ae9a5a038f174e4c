"""The history of a prompt search: versions, their records in the store, and the result.

Each version is a `prompt` record of the run. It is written when the version is created, so that a restarted run creates
only the missing versions.
"""

from __future__ import annotations

import difflib
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from agentlightning.base.field_help import explain_fields
from agentlightning.base.private_files import open_private, private_folder
from agentlightning.base.terminal import counted, one_line
from agentlightning.chat.bill import Bill
from agentlightning.errors import BadRequestError
from agentlightning.evaluation.paired import SIGN_TEST
from agentlightning.prompt_search.evaluator import digest_of
from agentlightning.prompt_search.results import Score
from agentlightning.training.records import RunLog
from agentlightning.types import NamedResources, PromptTemplate, ResourcesUpdate, SystemPrompt

logger = logging.getLogger(__name__)

VersionState = Literal["candidate", "kept", "dropped", "refused", "duplicate", "failed"]
"""`candidate`: not judged yet. `kept`: in the current set of the search. `dropped`: others were better. `refused`: the
text is not a version of the seed. `duplicate`: another version has the text. `failed`: critic or editor returned no
text."""
WITHOUT_TEXT: tuple[VersionState, ...] = ("refused", "duplicate", "failed")
"""States of versions that never run."""
_SPENT = "spent/"
"""Prefix of the names of records with the usage of failed or discarded versions."""
_PLAIN = ("version", "target", "round", "parent", "critique", "state", "score", "tasks", "failures")


@explain_fields
@dataclass
class PromptVersion:
    """One version of the prompts of a run."""

    version: str
    """Name of the version; `v0` is the seed."""
    templates: dict[str, PromptTemplate]
    """All searched templates by resource name."""
    target: str
    """Name of the template that differs from the parent; for the seed the first one."""
    round: int = 0
    """Round that created the version; 0 is before the first round."""
    parent: str | None = None
    """Name of the parent version."""
    critique: str | None = None
    """Critique of the parent."""
    state: VersionState = "candidate"
    problems: tuple[str, ...] = ()
    """Reasons why the version is refused."""
    score: float | None = None
    """Mean reward on its validation tasks so far; None without rewards."""
    interval: tuple[float, float] | None = None
    """95 % interval of the score."""
    tasks: int = 0
    """Number of validation tasks on which it has run."""
    failures: int = 0
    """Number of these tasks without a reward, because of an error or a late rollout."""
    bill: Bill = field(default_factory=Bill)
    """Usage of its critique and its edit."""

    @property
    def prompt_template(self) -> PromptTemplate:
        """The template that differs from the parent."""
        return self.templates[self.target]

    @property
    def number(self) -> int:
        """The number in its name."""
        return int(self.version.removeprefix("v"))

    @property
    def digest(self) -> str:
        """Digest of the prompts. Equal prompts have the same digest."""
        return digest_of(self.templates)

    def judge(self, score: Score) -> None:
        """Set the fields of a score."""
        self.score, self.tasks, self.failures = score.mean, score.tasks, score.tasks - score.scored
        self.interval = None if score.mean is None else (score.low, score.high)

    def as_json(self) -> dict[str, Any]:
        """Return the version as JSON data for `from_json`."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        more = {"problems": list(self.problems), "interval": self.interval and list(self.interval)}
        templates = {name: _template_as_json(template) for name, template in self.templates.items()}
        return {**plain, **more, "templates": templates, "digest": self.digest, "bill": self.bill.as_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PromptVersion:
        """Return the version from the data of `as_json`."""
        low_high = data["interval"]
        return cls(
            **{name: data[name] for name in _PLAIN},
            problems=tuple(data["problems"]),
            interval=None if low_high is None else (low_high[0], low_high[1]),
            templates={
                name: (SystemPrompt if "resource_type" in fields else PromptTemplate)(**fields)
                for name, fields in data["templates"].items()
            },
            bill=Bill.from_json(data["bill"]),
        )


def _template_as_json(template: PromptTemplate) -> dict[str, Any]:
    kind = {"resource_type": template.resource_type} if isinstance(template, SystemPrompt) else {}
    return {"engine": template.engine, "template": template.template, **kind}


class History:
    """The versions of one run by number, and their records. Used only in the algorithm's event loop.

    Args:
        folder: Folder for `history.json`; None for no file.
        published: Returns the resources of a version by its name, or None if it was never published.
    """

    def __init__(
        self,
        log: RunLog,
        folder: Path | None = None,
        published: Callable[[str], Awaitable[ResourcesUpdate | None]] | None = None,
    ) -> None:
        self._log, self._published = log, published
        self._folder = None if folder is None else private_folder(folder)
        self.versions: list[PromptVersion] = []
        self._recorded: dict[str, PromptVersion] = {}
        """Versions of earlier starts that have not been reused yet."""
        self._highest = self._taken = 0
        """Numbers of the last recorded version and of the last used name. Records are written once."""

    @property
    def has_recorded(self) -> bool:
        """True until `recorded` or `resume` have returned all versions of an earlier start."""
        return bool(self._recorded)

    async def open(self, seed: PromptVersion) -> Bill:
        """Start with the seed, and return the usage of earlier starts of the run.

        A record hides text that looks like a secret. The text of such a version is read from its published resources.
        A version that was never published is created again.

        Raises:
            BadRequestError: The run started with other prompts.
        """
        self.versions = [seed]
        if not self._log.run_id:
            return Bill()
        records = await self._log.records("prompt", "state")
        spent = [Bill.from_json(record.data["bill"]) for record in records if record.name.startswith(_SPENT)]
        data = {record.name: record.data for record in records if record.kind == "prompt"}
        first = data.pop(seed.version, None)
        if first is None:
            await self._log.prompt(0, seed.version, seed.as_json())
        elif first["digest"] != seed.digest:
            raise BadRequestError(
                f"Run {self._log.run_id!r} began with other prompts. Use the same initial_resources, or another run_id"
            )
        versions = {name: PromptVersion.from_json(each) for name, each in data.items()}
        self._highest = max((version.number for version in versions.values()), default=0)
        for name, version in versions.items():
            if version.digest != data[name]["digest"] and self._published:
                update = await self._published(name)
                resources = {} if update is None else update.resources
                version.templates |= {
                    key: each
                    for key, each in resources.items()
                    if key in version.templates and isinstance(each, PromptTemplate)
                }
            if version.digest == data[name]["digest"]:
                self._recorded[name] = version
        if versions:
            logger.info("run %s: resumed with %s", self._log.run_id, counted(len(self._recorded), "version"))
        return Bill().merge(*(version.bill for version in versions.values()), *spent)

    async def resume(self, *, discard: bool) -> list[PromptVersion]:
        """Return the versions of earlier starts by number. With `discard` they are dropped."""
        versions, self._recorded = sorted(self._recorded.values(), key=lambda each: each.number), {}
        if discard:
            if versions:
                logger.warning("run %s: restarted, %s discarded", self._log.run_id, counted(len(versions), "version"))
            if self._log.run_id:
                await self._rewind(0)
            return []
        names = [record.data.get("version") for record in await self._log.records("evaluation")]
        validated = [int(name[1:]) for name in names if isinstance(name, str)]  # one may have no other record yet
        self._taken = max([self._highest, *validated])
        return versions

    def next_names(self, count: int) -> list[str]:
        """Return unused names for the next versions. Names of `resume` are also in use."""
        last = max(self._taken, *(version.number for version in self.versions))
        return [f"v{last + 1 + number}" for number in range(count)]

    async def recorded(self, wanted: Sequence[PromptVersion]) -> list[PromptVersion | None]:
        """Return the version of an earlier start for each version of a round, or None.

        If the parents of a round differ from the recorded ones, this round and all later rounds are repeated.
        """
        versions = [self._recorded.pop(version.version, None) for version in wanted]
        if all(
            old is None or (old.parent, old.target, old.round) == (new.parent, new.target, new.round)
            for old, new in zip(versions, wanted, strict=True)
        ):
            return versions
        logger.warning("run %s: differs from its record; repeating from round %d", self._log.run_id, wanted[0].round)
        self._recorded.clear()
        await self._rewind(wanted[0].round - 1)
        return [None] * len(wanted)

    async def record(self, version: PromptVersion) -> None:
        """Record a version. For a failed one, record only its usage, because a resumed run creates it again."""
        if not self._log.run_id:
            return
        if version.state != "failed":
            await self._log.prompt(version.round, version.version, version.as_json())
        else:
            await self._record_spent(version.bill, [version.version])

    async def _record_spent(self, bill: Bill, versions: Sequence[str]) -> None:
        if bill.requests:  # a rewind keeps step 0
            data = {"versions": list(versions), "bill": bill.as_json()}
            await self._log.state(0, data, f"{_SPENT}{uuid.uuid4().hex}")

    async def _rewind(self, step: int) -> None:
        data = [record.data for record in await self._log.records("prompt", step_from=step + 1)]
        bill = Bill().merge(*(Bill.from_json(each["bill"]) for each in data))
        await self._record_spent(bill, [each["version"] for each in data])
        await self._log.rewind(step)

    def write(self, **more: object) -> None:
        """Write `history.json` with the current state of all versions, if a folder is set."""
        if self._folder is None:
            return
        data = {**more, "versions": [version.as_json() for version in self.versions]}
        temporary = self._folder / "history.json.tmp"
        with open_private(temporary, "w") as file:
            json.dump(data, file, indent=2, ensure_ascii=False)
        temporary.replace(self._folder / "history.json")


@explain_fields
@dataclass
class PromptResult:
    """The best prompts and all versions of a search. `print` shows it as a table."""

    best: PromptVersion
    """The best version, or the seed if no version was better."""
    history: list[PromptVersion]
    """All versions in order of creation, including refused ones. The seed is the first."""
    best_resources: NamedResources = field(default_factory=dict, repr=False)
    """All initial resources with the best prompts in place of the seed's, for `Trainer.evaluate`."""
    bill: Bill = field(default_factory=Bill)
    """Usage of critics and editors over all starts of the run."""
    rollouts: int = 0
    """Number of rollouts enqueued by this start of the run."""
    stop_reason: str = "finished"
    """`finished`, or the reason for an early end of the search."""
    p_value: float | None = None
    """P-value of the exact sign test of the best version against the seed on the validation tasks, multiplied by the
    number of versions from which it was chosen; None if they were not compared."""
    seconds: float = 0.0
    """Duration of this start in seconds."""

    @property
    def seed(self) -> PromptVersion:
        """The initial prompts of the search."""
        return self.history[0]

    @property
    def best_templates(self) -> dict[str, PromptTemplate]:
        """The best prompts by resource name."""
        return self.best.templates

    @property
    def best_prompt(self) -> PromptTemplate:
        """The template of the best version that differs from its parent. For one template, the best prompt."""
        return self.best.prompt_template

    def diff(self) -> str:
        """Return the changes from the seed to the best prompts, as a unified diff; empty without changes."""
        lines = list[str]()
        for name, template in self.best.templates.items():
            texts = (self.seed.templates[name].template.splitlines(), template.template.splitlines())
            names = f"{name} ({self.seed.version})", f"{name} ({self.best.version})"
            lines += difflib.unified_diff(*texts, *names, lineterm="")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON data, except the resources, which may contain API keys."""
        return {
            "best": self.best.version,
            "stop_reason": self.stop_reason,
            "p_value": self.p_value,
            "rollouts": self.rollouts,
            "seconds": self.seconds,
            "bill": self.bill.as_json(),
            "diff": self.diff(),
            "versions": [version.as_json() for version in self.history],
        }

    def save(self, path: str | Path) -> None:
        """Write the result as JSON, readable only by its owner."""
        with open_private(path, "w") as file:
            json.dump(self.as_json(), file, indent=2, ensure_ascii=False)

    @override
    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("version", "round", "parent", "score", "interval", "tasks", "failed", "state", "prompt")
        ]
        for each in self.history:
            score = "" if each.score is None else f"{each.score:.3f}"
            bounds = "" if each.interval is None else "{:.2f}..{:.2f}".format(*each.interval)
            counts = (str(each.tasks), str(each.failures)) if each.tasks else ("", "")
            state = "best" if each is self.best else each.state
            text = one_line(" ".join(each.prompt_template.template.split()))[:48]
            rows.append((each.version, str(each.round), each.parent or "", score, bounds, *counts, state, text))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        change = "no version was better than the seed"
        if self.best is not self.seed:
            before, after = ("?" if s is None else f"{s:.3f}" for s in (self.seed.score, self.best.score))
            p = "" if self.p_value is None else f" (p = {self.p_value:.3g}, {SIGN_TEST})"
            change = f"{self.seed.version} {before} -> {self.best.version} {after}{p}"
        return f"{table}\n{change}; {counted(self.rollouts, 'rollout')}; {self.bill}; {self.stop_reason}"
