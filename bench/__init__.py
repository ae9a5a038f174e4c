"""Benchmarks: medians, and ratios within one run, because machines are shared and noisy."""
