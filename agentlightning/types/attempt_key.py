"""Attempt keys, which an agent gets instead of a real API key. Pure functions over the server's token.

A key contains the ids of its attempt and a signature, so the gateway verifies it without a look-up:
`agl-<rollout id>.<attempt id>.<signature>`. It is valid only for the model calls of that attempt. An attacker with a
key can check guesses of the token offline, so the token is stretched like a password.
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
    """Return the key of one attempt. `token` is the server's token; None for the token of this process."""
    signing = _signing_key((token if token is not None else server_token()) or _NO_TOKEN)
    message = f"{rollout_id}\n{attempt_id}".encode()
    signature = hmac.new(signing, message, hashlib.sha256).hexdigest()[:32]
    return f"{PREFIX}{rollout_id}.{attempt_id}.{signature}"


@lru_cache(maxsize=8)
def _signing_key(secret: str) -> bytes:
    """Stretch a token, once per process. Takes 16 MiB and about 50 ms, as does each guess of an attacker.

    Source: scrypt, RFC 7914, with N=2^14, r=8, p=1. The salt is fixed: gateway and runners share only the token.
    """
    return hashlib.scrypt(secret.encode(), salt=b"agentlightning attempt key", n=2**14, r=8, p=1, dklen=32)


def judge_key(key: str | None, rollout_id: str, attempt_id: str, token: str | None = None) -> KeyVerdict:
    """Verify the key of a request for this attempt, in constant time.

    `placeholder`: the value is not an attempt key (missing, "dummy", a provider's key).
    """
    if key is None or not key.startswith(PREFIX) or key.count(".") != 2:
        return "placeholder"
    if hmac.compare_digest(key.encode(), attempt_key(rollout_id, attempt_id, token).encode()):
        return "ok"
    same = key[len(PREFIX) :].rsplit(".", 1)[0] == f"{rollout_id}.{attempt_id}"
    return "forged" if same else "other_attempt"
