"""Event loops, threads and interrupts that can be awaited, limited in time and, as a last resort, abandoned."""
