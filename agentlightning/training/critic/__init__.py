"""A critic beside the policy: its settings, its value head, and the advantages that its values make of rewards."""
