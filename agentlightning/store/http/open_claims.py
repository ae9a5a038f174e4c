"""Claims whose reply a client did not get: it was lost, or the caller stopped waiting for it.

The store may have made such a claim, and it is then this worker's. So the next question of the worker is the same one
again, with the same token, until it is answered: a store that made the claim answers what it was.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from agentlightning.types import AttemptedRollout

Asker = tuple[int, str | None, str | None]
"""Process, worker and run: a copy of the client in a forked process does not ask its parent's questions."""
_MOST_ASKERS = 10_000


@dataclass(slots=True)
class Question:
    """One claim as it was asked for."""

    token: str
    arguments: dict[str, object]
    """Without the seconds to wait, which do not change what is claimed."""


@dataclass(slots=True)
class _Open:
    questions: list[Question] = field(default_factory=list[Question])
    surplus: list[AttemptedRollout] = field(default_factory=list[AttemptedRollout])


class OpenClaims:
    """The open questions of one client, by who asked. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[Asker, _Open] = OrderedDict()

    def take_claims(self, asker: Asker, limit: int) -> list[AttemptedRollout]:
        """Take up to `limit` claims that an answer held beyond what was asked for."""
        with self._lock:
            known = self._open.get(asker)
            if known is None:
                return []
            taken, known.surplus = known.surplus[:limit], known.surplus[limit:]
            self._forget_if_done(asker, known)
            return taken

    def take_question(self, asker: Asker) -> Question | None:
        """Take a question that was not answered; whoever takes it asks it again."""
        with self._lock:
            known = self._open.get(asker)
            if known is None or not known.questions:
                return None
            question = known.questions.pop(0)
            self._forget_if_done(asker, known)
            return question

    def put_question(self, asker: Asker, question: Question) -> None:
        """Keep a question whose answer is unknown."""
        with self._lock:
            self._of(asker).questions.append(question)

    def put_claims(self, asker: Asker, claims: list[AttemptedRollout]) -> None:
        """Keep claims beyond what was asked for, for the worker's next questions."""
        if claims:
            with self._lock:
                self._of(asker).surplus.extend(claims)

    def _of(self, asker: Asker) -> _Open:
        known = self._open.setdefault(asker, _Open())
        if len(self._open) > _MOST_ASKERS:  # of workers that have not come back
            self._open.popitem(last=False)
        return known

    def _forget_if_done(self, asker: Asker, known: _Open) -> None:
        if not known.questions and not known.surplus:
            del self._open[asker]
