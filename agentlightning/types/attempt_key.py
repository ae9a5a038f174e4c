"""Attempt keys, which an agent gets instead of a real API key. Pure functions over the server's token.

A key names its attempt and carries a signature, so the gateway checks it without a look-up:
`agl-<rollout id>.<attempt id>.<signature>`. It is valid for the model calls of that attempt only. A holder of a key
can test guesses of the token against its signature offline, so each guess costs as much as for a password.
"""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache
from typing import Literal

from agentlightning.base.process_secrets import server_token

PREFIX = "agl-"
_NO_TOKEN = "loopback without a token"

KeyVerdict = Literal["ok", "placeholder", "other_attempt", "forged"]


def attempt_key(rollout_id: str, attempt_id: str, token: str | None = None) -> str:
    """Return the key of one attempt. `token` is the server's secret; None is the one of this process."""
    signing = _signing_key((token if token is not None else server_token()) or _NO_TOKEN)
    message = f"{rollout_id}\n{attempt_id}".encode()
    signature = hmac.new(signing, message, hashlib.sha256).hexdigest()[:32]
    return f"{PREFIX}{rollout_id}.{attempt_id}.{signature}"


@lru_cache(maxsize=8)
def _signing_key(secret: str) -> bytes:
    """Stretch a token, once per process: 16 MiB and about 50 ms, for this process and for an attacker alike.

    Source: scrypt, RFC 7914, with N=2^14, r=8, p=1. The salt is fixed, since gateway and runners share the token alone.
    """
    return hashlib.scrypt(secret.encode(), salt=b"agentlightning attempt key", n=2**14, r=8, p=1, dklen=32)


def judge_key(key: str | None, rollout_id: str, attempt_id: str, token: str | None = None) -> KeyVerdict:
    """Return how a presented key relates to this attempt; compares in constant time.

    `placeholder` is any value that is not an attempt key (absent, "dummy", a provider's key).
    """
    if key is None or not key.startswith(PREFIX) or key.count(".") != 2:
        return "placeholder"
    if hmac.compare_digest(key.encode(), attempt_key(rollout_id, attempt_id, token).encode()):
        return "ok"
    same = key[len(PREFIX) :].rsplit(".", 1)[0] == f"{rollout_id}.{attempt_id}"
    return "forged" if same else "other_attempt"
