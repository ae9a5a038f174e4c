"""One run from start to end: the roles of its processes, their supervision and its stop."""
