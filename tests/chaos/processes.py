"""Processes that start in milliseconds: forked from one that has imported everything already."""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
"""Makes the processes of this folder; their target must live at module level."""

CONTEXT.set_forkserver_preload(["agentlightning", "tests.chaos.stores"])
