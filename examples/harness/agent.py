"""The agent of learn.py: mini-swe-agent, from the folder in the variable TOOLS (by default `mini`)."""

from __future__ import annotations

import os
from pathlib import Path

from counting import SYSTEM

import agentlightning as agl

PROMPTS = {
    "agent": {"system_template": SYSTEM, "instance_template": "{{task}}", "step_limit": 4},
    "model": {"observation_template": "{{ output.output }}", "format_error_template": "Use bash."},
}
"""Settings of mini-swe-agent: its own prompts have more words than the small model knows."""

agent = agl.HarborAgent(
    {"name": "mini-swe-agent", "kwargs": {"config": PROMPTS}}, tools=[Path(os.environ.get("TOOLS", "mini")).absolute()]
)
