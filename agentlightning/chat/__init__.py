"""Model calls of the framework itself: of a critic, of an editor, and of a judge, which scores one answer, compares it
with another or ranks a group. Calls of agents are traced, and recorded by the gateway."""
