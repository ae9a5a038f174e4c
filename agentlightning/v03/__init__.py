"""What an installation of v0.3 has kept, taken over into a store: `agl import-v03`.

`source.py` says what is read, `mongo.py`, `server.py` and `dump.py` read it from where it lies, `opening.py` chooses
among them, `convert.py` makes the values of this package of it, `importing.py` writes them and counts.
"""
