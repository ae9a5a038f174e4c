"""A run that TRL trains."""
