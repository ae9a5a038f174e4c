"""What SQLite and PostgreSQL share: threads, dialect, queries, summaries, run records, and the `Tx` over them."""
