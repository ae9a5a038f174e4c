"""The tree of spans of one attempt: its repair, its agents and calls, and their rewards."""
