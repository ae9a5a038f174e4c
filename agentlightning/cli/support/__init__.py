"""What the commands of `agl` share: output, access to a store, serving until a signal."""
