"""Records of a call at the gateway: spans, the journal of calls in progress, replay, privacy."""
