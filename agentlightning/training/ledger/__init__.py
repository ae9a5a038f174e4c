"""The training ledger: what became of every model call, trained or excluded with a reason."""
