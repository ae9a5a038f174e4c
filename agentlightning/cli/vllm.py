"""`python -m agentlightning.cli.vllm`: the command `agl vllm`."""

import sys

from agentlightning.cli.main import main_of

main = main_of("vllm")

if __name__ == "__main__":
    sys.exit(main())
