"""The rules of the store: each operation is one function over the primitives of `tx.Tx`."""
