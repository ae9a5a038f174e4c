"""What a training run writes down: its records in the store, and a folder of copies for people."""
