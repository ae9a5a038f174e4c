"""`python -m agentlightning.cli.store`: the command `agl store`."""

import sys

from agentlightning.cli.main import main_of

main = main_of("store")

if __name__ == "__main__":
    sys.exit(main())
