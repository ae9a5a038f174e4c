"""Import of the data of v0.3 into a store: `agl import-v03`.

`source.py` has the protocol of a source, which `mongo.py`, `server.py` and `dump.py` implement; `convert.py` creates
the values of this package; `importing.py` writes and counts them.
"""

from __future__ import annotations

from pathlib import Path

from agentlightning.errors import BadRequestError
from agentlightning.legacy.v03.source import Source


def open_source(place: str, partition: str | None = None) -> Source:
    """Return the source at `place`: a MongoDB URI, the address of a server, a file or a folder.

    `partition` selects one of several stores in a MongoDB database; `all` reads all of them.

    Raises:
        BadRequestError: `place` is none of these, or the source has no partitions and `partition` is set.
        MissingExtraError: the MongoDB driver is not installed.
    """
    if place.startswith(("mongodb://", "mongodb+srv://")):
        from agentlightning.legacy.v03.mongo import MongoSource

        return MongoSource(place, partition)
    if partition is not None:
        raise BadRequestError(f"--partition {partition!r}: only a MongoDB database has partitions; omit the option")
    if place.startswith(("http://", "https://")):
        from agentlightning.legacy.v03.server import ServerSource

        return ServerSource(place)
    if Path(place).exists():
        from agentlightning.legacy.v03.dump import DumpSource

        return DumpSource(Path(place))
    raise BadRequestError(
        f"{place!r} is not a source; expected mongodb://host/database, the address of a v0.3 server "
        "(http://127.0.0.1:4747), or an existing file or folder of JSON"
    )
