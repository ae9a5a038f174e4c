"""The SQL that SQLite and PostgreSQL share: schema words, queries, summaries, run records, and the `Tx` over them."""
