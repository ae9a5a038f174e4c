"""Programs as agents: the command, its environment, its process group and its reward."""
