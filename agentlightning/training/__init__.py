"""One training run: collect rollouts, make rows, update the weights, record each step."""
