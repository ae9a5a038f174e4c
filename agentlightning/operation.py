"""`operation`, for programs that import it from here; it is defined in `agentlightning.emitter.annotation`.

Importing a module sets it on its package, where `agl.operation` is the decorator. So the decorator replaces the
module, with itself as the one name to import from it.
"""

import sys
from typing import Any, cast

from agentlightning.emitter.annotation import operation

__all__ = ["operation"]

cast("Any", operation).operation = operation
cast("dict[str, Any]", sys.modules)[__name__] = operation
