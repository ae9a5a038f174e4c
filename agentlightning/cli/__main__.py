"""`python -m agentlightning.cli`: the command `agl`, for when its script is not on the path."""

import sys

from agentlightning.cli.main import main

sys.exit(main())
