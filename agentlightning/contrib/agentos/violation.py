"""One action that a policy kernel refused, and its annotation in a trace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from agentlightning.terminal import cut
from agentlightning.types import Attributes
from agentlightning.utils.masking import masked, masked_text

VIOLATION_NAME = "policy_violation"
"""Name of the annotation that records a violation in the trace."""
LONGEST_TEXT = 4096
"""Characters of a reason, of arguments or of a result that are kept."""
_OF_THE_KERNEL = ("_syscall", "_ring")
"""What `KernelSpace` adds to the arguments of a system call before it asks the policy."""


@dataclass(frozen=True, slots=True)
class Violation:
    """An action that was refused. Secrets in its texts are hidden, as in the messages of errors."""

    reason: str
    """The reason of the policy."""
    agent_id: str | None = None
    """The agent, which is also the role by which the policy decides."""
    tool: str | None = None
    """The tool, or the policy's name for the system call: `file_write`."""
    syscall: str | None = None
    """The system call: `SYS_EXEC`."""
    arguments: str | None = None
    """Its arguments as JSON, at most `LONGEST_TEXT` characters."""

    @classmethod
    def of_syscall(cls, reason: object, agent_id: object, tool: object, args: Mapping[str, object]) -> Violation:
        """Return the violation of a system call that the policy of a `KernelSpace` refused."""
        own = {key: value for key, value in args.items() if key not in _OF_THE_KERNEL}
        return cls(readable_reason(reason), str(agent_id), str(tool), str(args.get("_syscall")), arguments_text(own))

    def attributes(self) -> Attributes:
        """Return the attributes of its annotation, without those that are not known."""
        values = {
            "name": VIOLATION_NAME,
            "violation": self.reason,
            "agent_os.agent_id": self.agent_id,
            "agent_os.tool": self.tool,
            "agent_os.syscall": self.syscall,
            "agent_os.arguments": self.arguments,
        }
        return {key: value for key, value in values.items() if value is not None}

    def __str__(self) -> str:
        return self.reason


def readable_reason(reason: object) -> str:
    """Return the reason of a refusal as text without secrets."""
    return cut(masked_text(str(reason)), LONGEST_TEXT)


def arguments_text(arguments: object) -> str:
    """Return arguments as JSON without secrets; a value that JSON cannot hold is the name of its class."""
    try:
        known: Any = json.loads(json.dumps(arguments, default=_class_name, skipkeys=True))
    except (ValueError, RecursionError):  # an agent may pass a value that contains itself
        known = _class_name(arguments)
    return cut(json.dumps(masked(known), ensure_ascii=False), LONGEST_TEXT)


def without_secrets(text: str) -> str:
    """Return a text, JSON or not, in which secrets are hidden, of at most `LONGEST_TEXT` characters."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return readable_reason(text)
    return arguments_text(cast("object", value)) if isinstance(value, (dict, list)) else readable_reason(text)


def _class_name(value: object) -> str:
    return f"<{type(value).__qualname__}>"
