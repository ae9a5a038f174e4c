"""What the gateway keeps of a call: spans, the journal of calls under way, replay, privacy."""
