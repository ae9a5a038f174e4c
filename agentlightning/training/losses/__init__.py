"""The formulas of the learning step as pure functions: advantages of a group, objectives over masked tokens."""
