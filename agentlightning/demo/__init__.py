"""The demo: a tiny model, an ordinary agent, and a report on its training. May import torch."""
