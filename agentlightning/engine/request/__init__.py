"""What a request asks of the engine: its fields, tools, forced forms, stop texts and changes of the distribution."""
