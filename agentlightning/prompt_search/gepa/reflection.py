"""Reflection: what the model is shown of rollouts, and the texts that it proposes.

The prompt and the reading of the reply are those of the package (`InstructionProposalSignature`); the calls go through
`Chat`, all of an iteration at the same time. A proposal that is no version of the seed's template is sent back once.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from gepa.proposer.reflective_mutation.reflection_lm import ReflectionJob, ReflectionLM, ReflectionProposal
from gepa.strategies.instruction_proposal import InstructionProposalSignature

from agentlightning.chat.bill import Bill, LimitReached
from agentlightning.chat.chat import Chat, ChatError
from agentlightning.prompt_search.candidates import check_version, gaps_shown
from agentlightning.prompt_search.cases import RolloutResult, hidden_secrets
from agentlightning.prompt_search.history import VersionState
from agentlightning.semconv import AGL_ANNOTATION, AGL_MESSAGE
from agentlightning.types import PromptTemplate

logger = logging.getLogger("agentlightning.algorithm.gepa")
T = TypeVar("T")
Record = Mapping[str, Any]
_MODEL_SPANS = ("gen_ai.", "llm.")
_SHOWN_SPANS = 20


class Bridge(Protocol):
    """From the thread of the package into the event loop of the algorithm."""

    def call(self, work: Any) -> Any:
        """Return what a coroutine gives; raises `Interrupted` if the run was cancelled."""
        ...


@dataclass
class Proposed:
    """A version as the model proposed it, before it was played."""

    text: str | None
    """None if nothing came of it."""
    state: VersionState = "candidate"
    problems: tuple[str, ...] = ()
    critique: str | None = None
    bill: Bill = field(default_factory=Bill)


class Reflector:
    """A `ReflectionLM` of the package that asks through `Chat`. Used by the package's thread alone.

    Args:
        known: takes each proposal, with the component and the texts of the parent.
        fields: further fields of the requests, such as `temperature`.
    """

    def __init__(
        self,
        chat: Chat,
        bridge: Bridge,
        seeds: Mapping[str, PromptTemplate],
        templates: str | Mapping[str, str] | None,
        known: Any,
        fields: Mapping[str, Any],
    ) -> None:
        self._chat, self._bridge, self._seeds, self._known = chat, bridge, seeds, known
        self._templates, self._fields = templates, dict(fields)
        self.failures: list[str] = []
        """Why the last calls in a row were not answered."""
        self.limit: LimitReached | None = None
        """The limit that was reached."""
        self.error: Exception | None = None
        """What made it impossible to ask: the package says it in its log and goes on."""

    @property
    def total_cost(self) -> float:
        """In the currency of the prices."""
        return self._chat.bill.cost or 0.0

    def reflect(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Record]],
        components_to_update: list[str],
    ) -> tuple[ReflectionProposal, ReflectionLM]:
        return self.reflect_many([(candidate, reflective_dataset, components_to_update)])[0]

    def reflect_many(self, jobs: list[ReflectionJob]) -> list[tuple[ReflectionProposal, ReflectionLM]]:
        """Return the proposals of all jobs, whose calls are made at the same time."""
        asked = [
            (number, name, candidate[name], data[name])
            for number, (candidate, data, names) in enumerate(jobs)
            for name in names
            if data.get(name)
        ]

        async def ask_all() -> list[Proposed]:
            return await asyncio.gather(*(self._propose(name, text, records) for _, name, text, records in asked))

        proposals = [ReflectionProposal(new_texts={}) for _ in jobs]
        for (number, name, _, _), proposed in zip(asked, self._bridge.call(ask_all()), strict=True):
            self._known(proposed, jobs[number][0], name)
            if proposed.text is not None:
                proposals[number].new_texts[name] = proposed.text
                proposals[number].raw_lm_outputs[name] = proposed.critique or ""
        return [(proposal, self) for proposal in proposals]

    async def _propose(self, name: str, text: str, records: Sequence[Record]) -> Proposed:
        template = self._templates.get(name) if isinstance(self._templates, Mapping) else self._templates
        rendered = InstructionProposalSignature.prompt_renderer(
            {"current_instruction_doc": text, "dataset_with_feedback": records, "prompt_template": template}
        )
        messages = [{"role": "user", "content": rendered}] if isinstance(rendered, str) else rendered
        proposed = Proposed(None)
        try:
            said = await self._ask(messages, "reflection", proposed.bill)
            checked = check_version(said, self._seeds[name])
            if checked.template is None and said.strip():
                logger.warning("%s: the proposed text is sent back once: %s", name, " ".join(checked.problems))
                repair = _repair_request(said, checked.problems, self._seeds[name])
                said = await self._ask([*messages, *repair], "repair", proposed.bill)
                checked = check_version(said, self._seeds[name])
        except ChatError as error:
            logger.error("%s: no text was proposed: %s", name, error)
            self.failures.append(str(error))
            proposed.state, proposed.problems = "failed", (str(error),)
            return proposed
        except LimitReached as error:
            self.limit = error
            proposed.state, proposed.problems = "failed", (str(error),)
            return proposed
        except Exception as error:  # a setting that cannot work: ends the search, see `Stopper`
            self.error = error
            proposed.state, proposed.problems = "failed", (str(error),)
            return proposed
        self.failures.clear()
        proposed.critique = said
        if checked.template is None:
            logger.warning("%s: the proposed text is refused: %s", name, " ".join(checked.problems))
            proposed.state, proposed.problems = "refused", checked.problems
        else:
            proposed.text = checked.template.template
        return proposed

    async def _ask(self, messages: Sequence[Mapping[str, Any]], purpose: str, bill: Bill) -> str:
        reply = await self._chat.ask(messages, purpose=purpose, settings=self._fields, bill=bill)
        return InstructionProposalSignature.output_extractor(reply.text.strip())["new_instruction"]


def _repair_request(said: str, problems: Sequence[str], seed: PromptTemplate) -> list[dict[str, str]]:
    kept = ", ".join(gaps_shown(seed)) or "(there are none)"
    request = (
        "This cannot be used:\n"
        + "\n".join(f"- {problem}" for problem in problems)
        + f"\nIts placeholders must be exactly these, as they are written: {kept}\n"
        "Give the repaired instructions within ``` blocks."
    )
    return [{"role": "assistant", "content": f"```\n{said}\n```"}, {"role": "user", "content": request}]


def reflective_records(results: Sequence[RolloutResult]) -> list[dict[str, Any]]:
    """Return what the model sees of rollouts: inputs, outputs, feedback. Secrets are hidden, long texts are cut."""
    return [_record(result) for result in hidden_secrets(results)]


def _record(result: RolloutResult) -> dict[str, Any]:
    reward = result["final_reward"]
    feedback = [f"The reward is {reward:g}." if reward is not None else "There is no reward: the rollout failed."]
    if result["failure"]:
        feedback.append(f"What went wrong: {result['failure']}")
    feedback += [f"{name}: {value}" for name, value in _noted(result).items()]
    return {
        "Inputs": _text(result["task"]),
        "Generated Outputs": _conversations(result) or "(no model call was recorded)",
        "Feedback": "\n".join(feedback),
    }


def _conversations(result: RolloutResult) -> str:
    lines = list[str]()
    for number, call in enumerate(result["messages"], start=1):
        lines += [f"Conversation {number}:"] if len(result["messages"]) > 1 else []
        for message in call["messages"]:
            said = message.get("content")
            called = message.get("tool_calls")
            lines.append(f"{message.get('role')}: {_text(said)}" + (f" {_text(called)}" if called else ""))
    return "\n".join(lines)


def _noted(result: RolloutResult) -> dict[str, str]:
    """Return what the agent noted itself: attributes of its annotations, messages, rewards by name, failed spans."""
    found = dict[str, str]()
    for span in result["spans"][:_SHOWN_SPANS]:
        attributes: Mapping[str, Any] = span["attributes"]
        if any(key.startswith(_MODEL_SPANS) for key in attributes):
            continue
        for key, value in attributes.items():
            if key.startswith("agentlightning.reward."):
                if key.endswith(".value") and (name := attributes.get(f"{key.removesuffix('.value')}.name")):
                    found[f"reward {name}"] = _text(value)
            elif span["name"] in (AGL_ANNOTATION, AGL_MESSAGE):
                found[key.removeprefix("agentlightning.")] = _text(value)
        status = span["status"]
        if status.get("status_code") == "ERROR" and status.get("description"):
            found[f"error in {span['name']}"] = _text(status["description"])
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
