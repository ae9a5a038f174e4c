"""The store over any backend: runs the rules, wakes waiting callers, ends what is past a limit."""
