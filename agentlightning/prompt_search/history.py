"""The versions of a search over prompts: where each comes from, what it took and what it earned.

Each version is a `prompt` record of the run, written when the version is made: what was paid for is not lost with the
process. A run that is started again reads them back and makes only those that are missing.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from agentlightning.chat.bill import Bill
from agentlightning.errors import BadRequestError
from agentlightning.field_help import explain_fields
from agentlightning.private_files import open_private, private_folder
from agentlightning.prompt_search.playing import digest_of
from agentlightning.prompt_search.scores import Score
from agentlightning.training.records import RunLog
from agentlightning.types import NamedResources, PromptTemplate, SystemPrompt

logger = logging.getLogger(__name__)

VersionState = Literal["candidate", "kept", "dropped", "refused", "duplicate", "failed"]
"""`candidate`: not judged yet. `kept`: in the search's present set. `dropped`: others were better. `refused`: its text
is no version of the seed. `duplicate`: the text is there already. `failed`: critic or editor gave no text."""
WITHOUT_TEXT: tuple[VersionState, ...] = ("refused", "duplicate", "failed")
"""States of versions that are played nowhere."""


@explain_fields
@dataclass
class PromptVersion:
    """One version of the prompts of a run."""

    version: str
    """`v0` is the seed."""
    templates: dict[str, PromptTemplate]
    """Every template that is searched, by the name of its resource."""
    target: str
    """The one in which it differs from its parent; of the seed the first one."""
    round: int = 0
    """In which it was made; 0 is before the first."""
    parent: str | None = None
    """The version that it was made from."""
    critique: str | None = None
    """What the critic said of the parent."""
    state: VersionState = "candidate"
    problems: tuple[str, ...] = ()
    """Why it is refused."""
    score: float | None = None
    """Mean reward on the validation tasks that it has played so far; None without any."""
    interval: tuple[float, float] | None = None
    """95 % interval of that."""
    tasks: int = 0
    """Validation tasks that it has played."""
    failures: int = 0
    """Those of them that earned nothing, through a fault or because they were late."""
    bill: Bill = field(default_factory=Bill)
    """What its critique and its edit have used."""

    @property
    def prompt_template(self) -> PromptTemplate:
        """The template in which it differs from its parent."""
        return self.templates[self.target]

    @property
    def number(self) -> int:
        """That of its name."""
        return int(self.version.removeprefix("v"))

    @property
    def digest(self) -> str:
        """What equal prompts have in common."""
        return digest_of(self.templates)

    def judged(self, score: Score) -> None:
        """Take over a score."""
        self.score, self.tasks, self.failures = score.mean, score.tasks, score.failures
        self.interval = None if score.mean is None else (score.low, score.high)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON data; `from_json` reads it back."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        templates = {name: _as_json(template) for name, template in self.templates.items()}
        more = {"problems": list(self.problems), "interval": self.interval and list(self.interval)}
        return {**plain, **more, "templates": templates, "digest": self.digest, "bill": self.bill.as_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PromptVersion:
        """Return the version that `as_json` was called on."""
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


def _as_json(template: PromptTemplate) -> dict[str, Any]:
    kind = {"resource_type": template.resource_type} if isinstance(template, SystemPrompt) else {}
    return {"engine": template.engine, "template": template.template, **kind}


ReadPublished = Callable[[str], Awaitable[NamedResources | None]]
"""Returns the resources that were published for a version, by its name; None if there are none."""


async def _nothing_published(_: str) -> None:
    return None


_SPENT: Final = "spent/"
"""How the names of the records begin that say what versions used that failed, or were forgotten."""
_PLAIN = ("version", "target", "round", "parent", "critique", "state", "score", "tasks", "failures")


class History:
    """The versions of one run, in the order of their numbers, and their records. Belongs to the algorithm's loop."""

    def __init__(self, log: RunLog, folder: Path | None = None) -> None:
        self._log = log
        self._folder = None if folder is None else private_folder(folder)
        self.versions: list[PromptVersion] = []
        self._recorded: dict[str, PromptVersion] = {}
        self._highest = self._taken = 0
        """Number of the last version that an earlier start has recorded; of the last one whose name is taken: a record
        stays as it was written first."""
        self._keeps_records = bool(log.run_id)

    async def open(self, seed: PromptVersion, published: ReadPublished = _nothing_published) -> Bill:
        """Begin with the seed; returns what earlier starts of the run have used.

        A record hides what looks like a secret: the text of such a version is that of its `published` resources, and a
        version that was never published is made anew.

        Raises:
            BadRequestError: the run began with other prompts.
        """
        self.versions = [seed]
        if not self._keeps_records:
            return Bill()
        found = await self._log.records("prompt", "state")
        records = {record.name: record.data for record in found if record.kind == "prompt"}
        spent = [Bill.from_json(record.data["bill"]) for record in found if record.name.startswith(_SPENT)]
        first = records.pop(seed.version, None)
        if first is None:
            await self._log.prompt(0, seed.version, seed.as_json())
        elif first["digest"] != seed.digest:
            raise BadRequestError(
                f"Run {self._log.run_id!r} began with other prompts than initial_resources has now. Give them again, "
                "or give the run another run_id"
            )
        self._highest = max((int(name[1:]) for name in records), default=0)
        read = {name: PromptVersion.from_json(data) for name, data in records.items()}
        for name, version in read.items():
            if version.digest != records[name]["digest"] and (resources := await published(name)) is not None:
                texts = {key: each for key, each in resources.items() if key in version.templates}
                version.templates |= {key: each for key, each in texts.items() if isinstance(each, PromptTemplate)}
        self._recorded = {name: version for name, version in read.items() if version.digest == records[name]["digest"]}
        if read:
            logger.info("Run %s goes on: %d versions are there already", self._log.run_id, len(self._recorded))
        return Bill().merge(*(version.bill for version in read.values()), *spent)

    async def go_on(self, *, anew: bool) -> list[PromptVersion]:
        """Return what earlier starts have recorded, in the order of the versions; with `anew`, it is forgotten."""
        found, self._recorded = sorted(self._recorded.values(), key=lambda each: each.number), {}
        if anew:
            if found:
                logger.warning("Run %s begins anew: its %d versions are forgotten", self._log.run_id, len(found))
            if self._keeps_records:
                await self._rewind(0)
            return []
        named = [record.data.get("version") for record in await self._log.records("evaluation")]
        validated = [int(name[1:]) for name in named if isinstance(name, str)]  # one may have no other record yet
        self._taken = max([self._highest, *validated])
        return found

    @property
    def goes_on(self) -> bool:
        """True while there are versions of an earlier start that were not asked for yet."""
        return bool(self._recorded)

    def next_names(self, count: int) -> list[str]:
        """Return the names of the next versions: no version that is there, or that `go_on` gave, has one of them."""
        last = max(self._taken, *(version.number for version in self.versions))
        return [f"v{last + 1 + number}" for number in range(count)]

    async def recorded(self, wanted: Sequence[PromptVersion]) -> list[PromptVersion | None]:
        """Return of each version of a round what an earlier start has made of it, None where it has not.

        A round with other parents than at that time is made anew, and so are all later ones.
        """
        found = [self._recorded.pop(version.version, None) for version in wanted]
        same = [
            old is None or (old.parent, old.target, old.round) == (new.parent, new.target, new.round)
            for old, new in zip(found, wanted, strict=True)
        ]
        if all(same):
            return found
        logger.warning("Run %s goes another way from round %d on", self._log.run_id, wanted[0].round)
        self._recorded.clear()
        await self._rewind(wanted[0].round - 1)
        return [None] * len(wanted)

    async def record(self, version: PromptVersion) -> None:
        """Write down a version that was made; of one that failed, what it used, since a run that goes on asks again."""
        if not self._keeps_records:
            return
        if version.state != "failed":
            await self._log.prompt(version.round, version.version, version.as_json())
        else:
            await self._record_spent(version.bill, of=[version.version])

    async def _record_spent(self, bill: Bill, *, of: Sequence[str]) -> None:
        """Write down what versions used whose records are not there, or not any more."""
        if bill.requests:
            data = {"versions": list(of), "bill": bill.as_json()}
            await self._log.state(0, data, f"{_SPENT}{uuid.uuid4().hex}")  # step 0 outlives every rewind

    async def _rewind(self, step: int) -> None:
        gone = [record.data for record in await self._log.records("prompt", step_from=step + 1)]
        bill = Bill().merge(*(Bill.from_json(data["bill"]) for data in gone))
        await self._record_spent(bill, of=[data["version"] for data in gone])
        await self._log.rewind(step)

    def add(self, versions: Sequence[PromptVersion]) -> None:
        """Add the versions of a round, in the order of their numbers."""
        self.versions.extend(versions)

    def write(self, **more: object) -> None:
        """Write `history.json` into the folder, if there is one: every version as it stands."""
        if self._folder is None:
            return
        data = {**more, "versions": [version.as_json() for version in self.versions]}
        temporary = self._folder / "history.json.tmp"
        with open_private(temporary, "w") as file:
            json.dump(data, file, indent=2, ensure_ascii=False)
        temporary.replace(self._folder / "history.json")
