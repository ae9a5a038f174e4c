"""The demo: a tiny model, an agent with a calculator, and a report on its training. May import torch."""
