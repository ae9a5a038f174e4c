"""Reflection of GEPA: the records of rollouts for the model, and the texts that it proposes.

The prompt and the parsing of the reply are those of the package (`InstructionProposalSignature`). The calls use `Chat`,
and all calls of an iteration are concurrent. A proposal that is not a version of the seed's template is returned to the
model once.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from gepa.proposer.reflective_mutation.reflection_lm import ReflectionJob, ReflectionLM, ReflectionProposal
from gepa.strategies.instruction_proposal import InstructionProposalSignature

from agentlightning.chat.bill import Bill, LimitReached
from agentlightning.chat.chat import Chat, ChatError
from agentlightning.prompt_search.candidates import check_version, placeholder_list
from agentlightning.prompt_search.evaluator import Templates
from agentlightning.prompt_search.history import PromptVersion
from agentlightning.prompt_search.results import RolloutResult
from agentlightning.semconv import AGL_ANNOTATION, AGL_EXCEPTION, AGL_MESSAGE, AGL_OBJECT
from agentlightning.types import PromptTemplate
from agentlightning.utils.masking import masked

logger = logging.getLogger("agentlightning.algorithm.gepa")
T = TypeVar("T")
Candidate = dict[str, str]
"""Texts by template name, in the form of the package."""
Record = Mapping[str, Any]
_MODEL_SPANS = ("gen_ai.", "llm.")
_EMITTED = (AGL_ANNOTATION, AGL_MESSAGE, AGL_OBJECT, AGL_EXCEPTION)
_SHOWN_SPANS = 20


class Interrupted(Exception):
    """Raised in the package's thread to end it after the run was cancelled."""


class LoopBridge:
    """Bridge for calls from the package's thread into the event loop. `close` cancels the pending call."""

    def __init__(self) -> None:
        self._loop, self._closed = asyncio.get_running_loop(), False
        self._running: asyncio.Task[Any] | None = None

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and return its result.

        Raises:
            Interrupted: The run was cancelled.
        """
        if self._closed:
            work.close()
            raise Interrupted("the run was cancelled")

        async def run() -> T:
            self._running = asyncio.current_task()
            if self._closed:
                work.close()
                raise asyncio.CancelledError
            return await work

        try:
            return asyncio.run_coroutine_threadsafe(run(), self._loop).result()
        except CancelledError:
            raise Interrupted("the run was cancelled") from None

    def close(self) -> None:
        """Reject later calls, and cancel the running one. Called in the event loop."""
        self._closed = True
        if self._running is not None and not self._running.done():
            self._running.cancel()


def templates_of(candidate: Candidate, seeds: Templates) -> dict[str, PromptTemplate]:
    return {name: seed.model_copy(update={"template": candidate[name]}) for name, seed in seeds.items()}


class Reflector:
    """A `ReflectionLM` of the package that uses `Chat`. Used only by the package's thread.

    Args:
        prompts: Prompt for the reflection, one for all templates or one for each; None for the package's prompt.
        fields: Additional fields of the requests, such as `temperature`.
        add: Called with each proposal, a version without a name, and its source candidate.
    """

    def __init__(
        self,
        chat: Chat,
        bridge: LoopBridge,
        seeds: Templates,
        prompts: str | Mapping[str, str] | None,
        fields: Mapping[str, Any],
        add: Callable[[PromptVersion, Candidate], None],
    ) -> None:
        self._chat, self._bridge, self._seeds, self._add = chat, bridge, seeds, add
        self._prompts, self._fields = prompts, fields
        self.failures: list[str] = []
        """Reasons of the latest consecutive failed calls."""
        self.error: Exception | None = None
        """The error or reached limit that ends the search. The package only logs it."""

    @property
    def total_cost(self) -> float:
        """The cost so far, in the currency of the prices."""
        return self._chat.bill.cost or 0.0

    def reflect(
        self, candidate: Candidate, reflective_dataset: Mapping[str, Sequence[Record]], components_to_update: list[str]
    ) -> tuple[ReflectionProposal, ReflectionLM]:
        return self.reflect_many([(candidate, reflective_dataset, components_to_update)])[0]

    def reflect_many(self, jobs: list[ReflectionJob]) -> list[tuple[ReflectionProposal, ReflectionLM]]:
        """Return the proposals of all jobs, with concurrent calls."""
        pending = [
            (number, candidate, name, records[name])
            for number, (candidate, records, names) in enumerate(jobs)
            for name in names
            if records.get(name)
        ]

        async def propose_all() -> list[PromptVersion]:
            return await asyncio.gather(*(self._propose(*job[1:]) for job in pending))

        proposals = [ReflectionProposal(new_texts={}) for _ in jobs]
        for (number, candidate, name, _), version in zip(pending, self._bridge.call(propose_all()), strict=True):
            if version.state == "candidate":
                proposals[number].new_texts[name] = version.prompt_template.template
                proposals[number].raw_lm_outputs[name] = version.critique or ""
            self._add(version, candidate)
        return [(proposal, self) for proposal in proposals]

    async def _propose(self, candidate: Candidate, name: str, records: Sequence[Record]) -> PromptVersion:
        prompt = self._prompts.get(name) if isinstance(self._prompts, Mapping) else self._prompts
        rendered = InstructionProposalSignature.prompt_renderer(
            {"current_instruction_doc": candidate[name], "dataset_with_feedback": records, "prompt_template": prompt}
        )
        messages = [{"role": "user", "content": rendered}] if isinstance(rendered, str) else rendered
        version = PromptVersion("", templates_of(candidate, self._seeds), name)
        try:
            text = await self._ask(messages, "reflection", version.bill)
            checked = check_version(text, self._seeds[name])
            if checked.template is None and text.strip():
                logger.warning("%s: invalid text, model tries once more: %s", name, " ".join(checked.problems))
                problems = "\n".join(f"- {problem}" for problem in checked.problems)
                request = (
                    f"This cannot be used:\n{problems}\nIts placeholders must be exactly these, as they are written: "
                    f"{placeholder_list(self._seeds[name])}\nGive the repaired instructions within ``` blocks."
                )
                answer = {"role": "assistant", "content": f"```\n{text}\n```"}
                text = await self._ask(
                    [*messages, answer, {"role": "user", "content": request}], "repair", version.bill
                )
                checked = check_version(text, self._seeds[name])
        except ChatError as error:
            logger.error("%s: no text proposed: %s", name, error)
            self.failures.append(str(error))
            version.state, version.problems = "failed", (str(error),)
            return version
        except Exception as error:  # the package would only log it; see `GEPASearch.should_stop`
            if self.error is None or isinstance(self.error, LimitReached):
                self.error = error
            version.state, version.problems = "failed", (str(error),)
            return version
        self.failures.clear()
        version.critique = text
        if checked.template is None:
            logger.warning("%s: proposed text rejected: %s", name, " ".join(checked.problems))
            version.state, version.problems = "refused", checked.problems
        else:
            version.templates[name] = checked.template
        return version

    async def _ask(self, messages: Sequence[Mapping[str, Any]], purpose: str, bill: Bill) -> str:
        reply = await self._chat.ask(messages, purpose=purpose, settings=self._fields, bill=bill)
        return InstructionProposalSignature.output_extractor(reply.text.strip())["new_instruction"]


def reflective_records(results: Sequence[RolloutResult]) -> list[dict[str, Any]]:
    """Return the records for the model: inputs, outputs, feedback. Secrets are hidden, long texts are cut."""
    return [_record(result) for result in masked(list(results))]


def _record(result: RolloutResult) -> dict[str, Any]:
    reward = result["final_reward"]
    feedback = [f"The reward is {reward:g}." if reward is not None else "There is no reward: the rollout failed."]
    if result["failure"]:
        feedback.append(f"What went wrong: {result['failure']}")
    feedback += _notes(result)
    return {
        "Inputs": _text(result["task"]),
        "Generated Outputs": _conversations(result) or _spans(result) or "(nothing was recorded)",
        "Feedback": "\n".join(feedback),
    }


def _conversations(result: RolloutResult) -> str:
    lines = list[str]()
    for number, call in enumerate(result["messages"], start=1):
        lines += [f"Conversation {number}:"] if len(result["messages"]) > 1 else []
        for message in call["messages"]:
            calls = message.get("tool_calls")
            content = _text(message.get("content"))
            lines.append(f"{message.get('role')}: {content}" + (f" {_text(calls)}" if calls else ""))
    return "\n".join(lines)


def _spans(result: RolloutResult) -> str:
    return "\n".join(f"{span['name']}: {_text(span['attributes'])}" for span in result["spans"])


def _notes(result: RolloutResult) -> list[str]:
    """Return notes of the agent: attributes of what it emitted, rewards by name, failed spans."""
    notes = list[str]()
    own = [span for span in result["spans"] if not any(key.startswith(_MODEL_SPANS) for key in span["attributes"])]
    for span in own[:_SHOWN_SPANS]:
        attributes: Mapping[str, Any] = span["attributes"]
        for key, value in attributes.items():
            if key.startswith("agentlightning.reward."):
                if key.endswith(".value") and (name := attributes.get(f"{key.removesuffix('.value')}.name")):
                    notes.append(f"reward {name}: {_text(value)}")
            elif span["name"] in _EMITTED and key != "exception.stacktrace":
                notes.append(f"{key.removeprefix('agentlightning.')}: {_text(value)}")
        status = span["status"]
        if status.get("status_code") == "ERROR" and status.get("description"):
            notes.append(f"error in {span['name']}: {_text(status['description'])}")
    return notes


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
