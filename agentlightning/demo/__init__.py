"""The demo: a tiny model, an ordinary agent, and the report of what it learned. May import torch."""
