"""Integrations with other projects, none of which is needed to import them."""
