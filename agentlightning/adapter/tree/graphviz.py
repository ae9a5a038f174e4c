"""Draws the tree of a trace with Graphviz, for debugging."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

from agentlightning.adapter.tree.node import SpanNode
from agentlightning.private_files import make_private


def draw_tree(root: SpanNode, filename: str, interested_span_match: str | None = None) -> None:
    """Draw the tree into `filename.png`, spans whose name matches `interested_span_match` filled.

    Raises:
        RuntimeError: the program `dot` of Graphviz is not installed, or it failed.
    """
    program = shutil.which("dot")
    if program is None:
        raise RuntimeError(
            "Drawing a trace needs Graphviz: install the program 'dot' (on Debian: apt-get install graphviz), "
            "or read the tree with to_json() or names_tuple()."
        )
    target = Path(filename if filename.endswith(".png") else filename + ".png")
    make_private(target)
    command = [program, "-Tpng", "-o", str(target)]
    done = subprocess.run(command, input=dot_source(root, interested_span_match), text=True, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"dot could not draw {target}: {done.stderr.strip()}")


def dot_source(root: SpanNode, interested_span_match: str | None = None) -> str:
    """Return the tree in Graphviz's language."""
    names = {id(node): f"n{number}" for number, node in enumerate(root.walk())}
    lines = ["digraph trace {", "  rankdir=LR; node [shape=box, fontname=Helvetica];"]
    for node in root.walk():
        filled = interested_span_match is not None and re.search(interested_span_match, node.span.name)
        style = ", style=filled, fillcolor=lightblue" if filled else ""
        label = node.title()
        if node.start_time is not None and node.end_time is not None:
            label += f"\n{node.end_time - node.start_time:.3f} s"
        lines.append(f"  {names[id(node)]} [label={json.dumps(label, ensure_ascii=False)}{style}];")
        lines.extend(f"  {names[id(node)]} -> {names[id(child)]};" for child in node.children)
    return "\n".join([*lines, "}", ""])
