"""The paths of the page's data, as a table: `data.py` answers them, `description.py` describes them.

Needs nothing that takes long to import: the table is read when a server is made.
"""

from __future__ import annotations

from typing import Final, NamedTuple

MOST_PAIRS: Final = 1000
"""Of a page of tasks in a comparison."""


class Question(NamedTuple):
    """One path of the page's data."""

    path: str
    name: str
    """Of the operation in the description, and of the method of `Data` with an underscore before it."""
    summary: str
    answer: str
    """Name of the value in `values.py`."""
    query: tuple[str, ...] = ()
    """Names of the query's parameters."""


QUESTIONS: Final = (
    Question(
        "/rollouts/{rollout_id}/explanation",
        "explain_rollout",
        "Say for each model call of a rollout which row of training it went to, or why it is in none",
        "RolloutExplanation",
        ("attempt_id",),
    ),
    Question(
        "/rollouts/{rollout_id}/attempts/{attempt_id}/tree",
        "span_tree",
        "Return the spans of an attempt as a tree, with the gateway's calls where the agent made them",
        "SpanTree",
    ),
    Question(
        "/rollouts/{rollout_id}/attempts/{attempt_id}/conversation",
        "conversation",
        "Return what was said in an attempt, call by call; `latest` is the last attempt",
        "AttemptConversation",
        ("limit",),
    ),
    Question(
        "/comparison",
        "compare_sides",
        "Compare the same tasks on two sides: runs, steps of runs, or versions of resources, with the paired test",
        "Comparison",
        ("before", "after", "limit", "offset"),
    ),
    Question("/server", "server", "Say what the server is", "ServerFacts"),
)
