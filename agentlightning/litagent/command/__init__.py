"""Agents that are programs: the command, its environment, its process group and its reward."""
