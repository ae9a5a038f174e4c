"""Model calls that the framework itself makes: of a critic, an editor, a judge. Not those of agents, which the tracer
sees and the gateway records."""
