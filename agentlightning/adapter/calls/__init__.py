"""Model calls read from spans: one value for each call, duplicates merged, ordered and assigned to their policy."""
