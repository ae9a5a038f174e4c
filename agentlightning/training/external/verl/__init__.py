"""A run that VERL trains."""
