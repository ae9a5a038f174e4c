"""The store over HTTP: server, client, and the one table of operations that both read."""
