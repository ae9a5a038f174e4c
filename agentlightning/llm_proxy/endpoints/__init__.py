"""The model servers behind the gateway: which models they serve, which is healthy, which is asked next."""
