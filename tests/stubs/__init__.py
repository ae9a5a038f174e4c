"""Small real servers in place of services that a test machine does not have."""
