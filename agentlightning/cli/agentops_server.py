"""`python -m agentlightning.cli.agentops_server`: the command `agl agentops`."""

import sys

from agentlightning.cli.main import main_of

main = main_of("agentops")

if __name__ == "__main__":
    sys.exit(main())
