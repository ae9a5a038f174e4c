"""The tree of spans of one attempt: repaired, searched for agents and calls, matched with rewards."""
