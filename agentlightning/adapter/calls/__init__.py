"""Model calls read from spans: one value for each call, doubles merged, ordered and given to their policy."""
