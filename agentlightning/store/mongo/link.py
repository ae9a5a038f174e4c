"""The connection to a MongoDB store: the client for its URI, and the errors that are raised if the server fails. The
password of the URI is used only here: no repr, error or log line contains it."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from pymongo import MongoClient
from pymongo.errors import (
    BulkWriteError,
    ConnectionFailure,
    DocumentTooLarge,
    ExecutionTimeout,
    OperationFailure,
    PyMongoError,
    WTimeoutError,
)

from agentlightning.errors import (
    AgentLightningError,
    BadRequestError,
    StoreUnreachableError,
    StoreWriteError,
    TooLargeError,
)
from agentlightning.store.mongo.documents import Document
from agentlightning.utils.backoff import OUTAGE_SECONDS

DEFAULT_URI, DATABASE = "mongodb://127.0.0.1:27017", "agentlightning"
_DEFAULTS: dict[str, Any] = {
    "serverSelectionTimeoutMS": 5_000,
    "connectTimeoutMS": 5_000,
    "socketTimeoutMS": 30_000,
    "w": "majority",
    "appName": "agentlightning",
}
"""Defaults for options that neither the URI nor the caller sets. The first limits one try; `OUTAGE_SECONDS` limits an
outage."""
logging.getLogger("pymongo.command").setLevel(logging.INFO)  # its DEBUG lines show documents, which may hold keys
_REFUSED = (13, 18, 8000)
"""Error codes: not authorized, wrong user or password."""
_REASON_LENGTH = 300


class Place:
    """The address of a server."""

    def __init__(self, uri: str, client_kwargs: Mapping[str, Any] | None = None) -> None:
        if not uri.startswith(("mongodb://", "mongodb+srv://")):
            raise BadRequestError(
                "The URI of a MongoDB store must be of the form mongodb://user:password@host:27017/database; "
                f"got a URI that begins with {uri.partition(':')[0][:20]!r}"
            )
        self._uri = uri
        named = [piece.partition("=")[0] for piece in uri.partition("?")[2].split("&")]
        options = {name.lower() for name in (*named, *(client_kwargs or ()))}
        defaults = {name: value for name, value in _DEFAULTS.items() if name.lower() not in options}
        self._options = {**defaults, **(client_kwargs or {})}
        self.outage_seconds = 0.0 if "serverselectiontimeoutms" in options else OUTAGE_SECONDS
        """Seconds for which a server can be unreachable before a call fails; 0 if the driver's limit is set."""
        self._text = "a MongoDB URI"
        self.client().close()
        scheme, address = uri.split("://", 1)
        user, _, host = re.split(r"[/?]", address, maxsplit=1)[0].rpartition("@")
        self._secrets = [secret for secret in (user.partition(":")[2],) if secret]
        self._secrets += [unquote(secret) for secret in self._secrets]
        self._text = f"{scheme}://{user.partition(':')[0] + '@' if user else ''}{host}"

    def __repr__(self) -> str:
        return self._text

    @property
    def database(self) -> str | None:
        """The database in the URI."""
        return unquote(urlsplit(self._uri).path.strip("/")) or None

    def client(self) -> MongoClient[Document]:
        """Return a client that connects at its first use.

        Raises:
            BadRequestError: the URI or an option is invalid.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # the driver warns of an unknown option
                client = MongoClient[Document](self._uri, connect=False, **self._options)
        except (PyMongoError, ValueError, TypeError, UserWarning) as error:
            reason = f": {error}" if isinstance(error, UserWarning) else " (not shown: it may contain a password)"
            raise BadRequestError(
                f"The URI or an option of the MongoDB store is invalid{reason}; expected "
                "mongodb://user:password@host:27017/database?option=value with %-escapes for special characters"
            ) from None  # the cause quotes the URI
        if not client.write_concern.acknowledged:
            client.close()
            raise BadRequestError("The option w=0 of the MongoDB store can lose changes without an error; remove it")
        return client

    def failed(self, error: PyMongoError) -> AgentLightningError:
        """Return the error for the callers for an error of the driver."""
        reason = str(error)  # only the cause: without documents, which may hold keys, and without the password
        if isinstance(error, BulkWriteError):
            failures = [*error.details.get("writeErrors", ()), *error.details.get("writeConcernErrors", ())]
            reason = "; ".join(sorted({str(failure.get("errmsg")) for failure in failures}))
        elif isinstance(error, OperationFailure):
            reason = str((error.details or {}).get("errmsg", reason))
        reason = reason.partition(", Topology Description")[0]
        for secret in self._secrets:
            reason = reason.replace(secret, "***")
        reason = reason[:_REASON_LENGTH]
        if isinstance(error, (ConnectionFailure, ExecutionTimeout, WTimeoutError)):
            return StoreUnreachableError(
                f"The MongoDB store {self!r} cannot be reached: {reason}. Check that the server runs and that its "
                "address is correct. The call may have been stored, so repeat it with its token."
            )
        if isinstance(error, OperationFailure) and error.code in _REFUSED:
            return StoreUnreachableError(
                f"The MongoDB store {self!r} rejects this user: {reason}. Check user, password and authSource in its "
                "URI, and that the user has permission to read and write the database."
            )
        if isinstance(error, DocumentTooLarge):
            return TooLargeError(f"Too large for the MongoDB store {self!r}: {reason}")
        return StoreWriteError(
            f"The call failed in the MongoDB store {self!r}: {reason}. Fix the cause and repeat the call."
        )
