"""Common code for SQLite and PostgreSQL: threads, dialect, queries, summaries, run records, and the `Tx`."""
