"""Who may call the gateway, and how much: keys, addresses, budgets and bounds."""
