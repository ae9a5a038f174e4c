"""Event loops, threads and interrupts, which can be awaited, limited in time and, at worst, abandoned."""
