"""The rules of the store: every operation as one function over the primitives of `tx.Tx`."""
