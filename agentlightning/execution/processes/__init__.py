"""Child processes of a run: started, watched, restarted and ended with all that they started."""
