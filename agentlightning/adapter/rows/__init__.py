"""Training rows made from model calls: turns merged where the next prompt begins with exactly the tokens so far."""
