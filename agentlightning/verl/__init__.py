"""`python -m agentlightning.verl key=value ...`; see `__main__.py`. The algorithm: `agentlightning.algorithm.verl`."""
