"""The store over HTTP: server, client, and the table of operations that both use."""
