"""Wrappers of a store: for one run, for missing operations, for metrics, for checks of texts."""
