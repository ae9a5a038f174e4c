"""Where an agent's code runs: in a thread, or in a process of its own."""
