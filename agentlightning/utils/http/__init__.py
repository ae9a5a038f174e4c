"""The parts that all HTTP servers of this package share: serving, dispatch, bounds, keys and origins."""
