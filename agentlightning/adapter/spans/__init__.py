"""What one span says: its attributes in the conventions of several tracers, content, tokens and rewards."""
