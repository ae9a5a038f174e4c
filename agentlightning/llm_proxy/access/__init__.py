"""Access to the gateway: keys, addresses, budgets and limits."""
