"""Import of the data of v0.3 into a store: `agl import-v03`.

`source.py` names the places, `mongo.py`, `server.py` and `dump.py` read them, `convert.py` makes the values of this
package, `importing.py` writes and counts them.
"""
