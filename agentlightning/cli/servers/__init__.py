"""Commands that serve something: a store, the gateway, a trained model, metrics, and what other programs send."""
