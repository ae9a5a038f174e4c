"""`python -m agentlightning.cli.prometheus`: the command `agl prometheus`."""

import sys

from agentlightning.cli.main import main_of

main = main_of("prometheus")

if __name__ == "__main__":
    sys.exit(main())
