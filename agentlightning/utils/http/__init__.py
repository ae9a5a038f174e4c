"""The parts that every HTTP server of ours shares: serving, dispatch, bounds, keys and origins."""
