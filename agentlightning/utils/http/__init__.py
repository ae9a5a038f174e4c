"""The parts that all HTTP servers of this package share: serving, dispatch, limits, keys and origins."""
