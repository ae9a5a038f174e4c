"""`agl` with a warm start that stops as soon as it can, for tests of the training after it.

`python -m tests.demo.quick demo --steps 2` takes the path of `agl demo --steps 2`; the policy to begin with is bad.
"""

from __future__ import annotations

import sys
from typing import Any

from agentlightning.cli import main
from agentlightning.demo import settings

if __name__ == "__main__":
    hasty: Any = settings
    hasty.SKILL_BEFORE_SETTLING = 0.0
    hasty.SETTLING_STEPS = 50
    hasty.ACCURACY_AT_START = (0.0, 1.0)
    hasty.GREEDY_AT_START = 1.0
    sys.exit(main())
