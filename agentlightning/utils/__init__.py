"""The kernel: small parts that know no noun of ours but Span."""
