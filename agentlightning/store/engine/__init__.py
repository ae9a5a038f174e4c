"""The store over any backend: runs the rules, wakes waiting callers, ends attempts that are past a limit."""
