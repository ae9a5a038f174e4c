"""Event loops, threads and interrupts: awaited, limited in time, and left behind at worst."""
