"""The model servers behind the gateway: their models, their health, and the order of calls."""
