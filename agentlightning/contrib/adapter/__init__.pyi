from . import agentos as agentos
