"""Runs whose weights another system trains: TRL, VERL, Tinker."""
