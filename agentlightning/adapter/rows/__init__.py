"""Training rows from model calls. Turns are merged if the next prompt begins with exactly the tokens so far."""
