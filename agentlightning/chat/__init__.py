"""Model calls that the framework itself makes: of a critic, an editor, a judge, which scores one answer, compares it
with another or ranks a group. Those of agents are traced, and recorded by the gateway."""
