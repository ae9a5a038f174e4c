"""The promotion gate: whether a candidate may take the place of a baseline, by rules, with a report."""
