"""An MCP server over stdio with one tool, `search`, which searches the index file in its argument."""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUntypedFunctionDecorator=false
# The packages are in a separate environment (constraints.txt), where their types are known.

from __future__ import annotations

import sys
from pathlib import Path

import facts
from mcp.server.mcpserver import MCPServer

server = MCPServer("facts", log_level="WARNING")


@server.tool()
def search(query: str) -> str:
    """Return the sentence about countries that has all words of the query."""
    return facts.search(sys.argv[1], query)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit(f"usage: python server.py INDEX, a file that train.py makes; got {sys.argv[1:]}")
    server.run("stdio")
