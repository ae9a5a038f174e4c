"""The model servers behind the gateway: their models, their health, and the order in which they are called."""
