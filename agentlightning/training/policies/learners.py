"""What learns in a run: each policy with its settings, and all with their engines of them as the loop drives them.

One weight version counts for the whole run: an update that changed any policy makes a new one for all, so that a call's
stamp says which update it came after, whichever policy answered it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentlightning.engine.policy_engine import EngineStats, PolicyEngine
from agentlightning.training.checkpoint.weights import digest_of
from agentlightning.training.learner.policy import Policy
from agentlightning.training.settings import GRPOSettings

if TYPE_CHECKING:
    from agentlightning.adapter.rows.samples import Sample


@dataclass(frozen=True)
class Learner:
    """One policy that learns."""

    name: str | None
    """Of the gateway's policy; None for the only one of a run, which learns from all calls that the adapter selects."""
    settings: GRPOSettings
    policy: Policy

    def takes(self, sample: Sample) -> bool:
        """Return whether a row is of this policy."""
        return self.name is None or sample.policy == self.name


class Learners:
    """All policies of a run. Belongs to its loop."""

    def __init__(self, learners: Sequence[Learner], engines: Sequence[PolicyEngine] = ()) -> None:
        """`engines` serve the policies, in their order; there are none where nothing is sampled, as in a replay."""
        self.all = tuple(learners)
        self.engines = tuple(engines)

    @property
    def names(self) -> list[str] | None:
        """Of the policies; None where one learns from every call."""
        names = [each.name for each in self.all if each.name is not None]
        return names or None

    @property
    def weight_version(self) -> int:
        """How many updates of the run took a step."""
        return max(each.policy.weight_version for each in self.all)

    def advance(self, version: int) -> None:
        """Give every policy this version, those too whose weights an update left as they were."""
        for each in self.all:
            each.policy.weight_version = version

    @contextmanager
    def swap(self, timeout: float) -> Generator[None]:
        """Open the block in which the weights may change: no engine has anything in flight."""
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.swap(timeout))
            yield

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keep everybody from the weights of every policy."""
        with ExitStack() as stack:
            for each in self.all:
                stack.enter_context(each.policy.lock)
            yield

    def stats(self) -> EngineStats:
        """Return the sums of all engines since their start."""
        found = [engine.stats() for engine in self.engines]
        names = [field.name for field in dataclasses.fields(EngineStats)]
        return EngineStats(**{name: sum(getattr(one, name) for one in found) for name in names})

    def digest(self) -> str:
        """Return what equal weights of all policies have in common; see `digest_of`."""
        if self.names is None:
            return digest_of(self.all[0].policy)
        told = "".join(f"{each.name} {digest_of(each.policy)}\n" for each in self.all)
        return hashlib.sha256(told.encode()).hexdigest()

    def gives_probabilities(self) -> bool:
        """Return whether every policy can be sampled from."""
        return all(each.policy.gives_probabilities() for each in self.all)

    def save(self, folder: Path) -> None:
        """Write the model of each policy: into the folder itself, or into one of its name where there are several."""
        for each in self.all:
            each.policy.save(folder if each.name is None else folder / each.name)

    def divergences(self, samples: Sequence[Sample]) -> list[float]:
        """Return the divergence of each row from its policy's reference, in nats: (B,)."""
        found = [0.0] * len(samples)
        for each in self.all:
            rows = [row for row, sample in enumerate(samples) if each.takes(sample)]
            own = [samples[row] for row in rows]
            if own:
                of_rows = each.policy.divergences(own, loss=each.settings, temperature=each.settings.temperature)
                for row, value in zip(rows, of_rows, strict=True):
                    found[row] = value
        return found
