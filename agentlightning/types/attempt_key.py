"""Attempt keys: what an agent gets instead of a real API key. Pure functions over the server's token.

A key names its attempt and carries a signature, so the gateway checks it without a look-up:
`agl-<rollout id>.<attempt id>.<signature>`. It is good for the model calls of that attempt and for nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Literal

PREFIX = "agl-"
_NO_TOKEN = "loopback without a token"

KeyVerdict = Literal["ok", "placeholder", "other_attempt", "forged"]


def attempt_key(rollout_id: str, attempt_id: str, token: str | None = None) -> str:
    """Return the key of one attempt. `token` is the server's secret; None reads `AGL_TOKEN`."""
    secret = (token if token is not None else os.environ.get("AGL_TOKEN")) or _NO_TOKEN
    message = f"{rollout_id}\n{attempt_id}".encode()
    signature = hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()[:32]
    return f"{PREFIX}{rollout_id}.{attempt_id}.{signature}"


def judge_key(key: str | None, rollout_id: str, attempt_id: str, token: str | None = None) -> KeyVerdict:
    """Say what a presented key is for this attempt; compares in constant time.

    `placeholder` is anything that is no attempt key at all (absent, "dummy", a provider's key).
    """
    if key is None or not key.startswith(PREFIX) or key.count(".") != 2:
        return "placeholder"
    if hmac.compare_digest(key.encode(), attempt_key(rollout_id, attempt_id, token).encode()):
        return "ok"
    same = key[len(PREFIX) :].rsplit(".", 1)[0] == f"{rollout_id}.{attempt_id}"
    return "forged" if same else "other_attempt"
