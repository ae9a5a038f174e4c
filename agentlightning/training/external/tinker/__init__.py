"""A run that Tinker trains."""
