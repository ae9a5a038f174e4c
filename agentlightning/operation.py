"""`operation`, for programs that import it from here. It is defined in `agentlightning.emitter.annotation`.

Importing a module sets an attribute of its package, but `agl.operation` is the decorator. So the decorator replaces the
module, and has itself as its only importable name.
"""

import sys
from typing import Any, cast

from agentlightning.emitter.annotation import operation

__all__ = ["operation"]

cast("Any", operation).operation = operation
cast("dict[str, Any]", sys.modules)[__name__] = operation
