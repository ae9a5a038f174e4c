"""What every HTTP server of ours shares: serving, dispatch, bounds, keys and origins."""
