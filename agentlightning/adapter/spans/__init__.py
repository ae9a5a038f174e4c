"""Contents of one span: its attributes in the conventions of several tracers, content, tokens and rewards."""
