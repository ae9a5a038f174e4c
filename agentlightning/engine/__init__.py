"""The embedded inference engine: an OpenAI-style server over the weights that are being trained."""
