"""The SQL that SQLite and PostgreSQL share: dialect, queries, summaries, run records, and the `Tx` over them."""
