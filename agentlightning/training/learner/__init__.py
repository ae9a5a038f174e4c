"""The policy that learns: its weights, optimizer and memory, implemented with torch."""
