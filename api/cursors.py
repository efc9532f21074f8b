"""Cursors of lists: Temporal's page tokens, sealed, so that only what we gave out ever comes back to the server.

The server trusts its tokens: one that was made up is an internal error there, retried and logged.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final

_SEAL_BYTES: Final = 16


class Cursors:
    """Seals page tokens.

    Args:
        secret: of the deployment, the same for all its replicas.
    """

    def __init__(self, secret: str) -> None:
        # Its own key, so that a cursor can never pass for a link's signature.
        self._key = hmac.digest(secret.encode("utf-8"), b"list cursors", hashlib.sha256)

    def seal(self, token: bytes) -> str:
        """The cursor for a page token."""
        return base64.urlsafe_b64encode(self._seal(token) + token).decode("ascii")

    def open(self, cursor: str) -> bytes | None:
        """The page token in a cursor, or None when we did not make it."""
        try:
            sealed = base64.b64decode(cursor, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        seal, token = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        return token if hmac.compare_digest(seal, self._seal(token)) else None

    def _seal(self, token: bytes) -> bytes:
        return hmac.digest(self._key, token, hashlib.sha256)[:_SEAL_BYTES]
