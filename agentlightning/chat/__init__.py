"""Model calls that the framework itself makes: of a critic, an editor, a judge. Those of agents are traced, and
recorded by the gateway."""
