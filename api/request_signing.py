"""Signed requests: what is signed, and how the signature travels. Clients and the API share this file.

    Authorization: HMAC-SHA256 key=<key id>,timestamp=<unix seconds>,nonce=<16 to 64 of A-Z a-z 0-9 _ ->,
                   body=<hex SHA-256 of the body>,signature=<hex HMAC-SHA256>

The secret itself never travels, so that a proxy's log or a stolen request opens nothing but that one request, once.
The lines that are signed are in `string_to_sign`; docs/security.md has them in words, with an example.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import httpx

SCHEME: Final = "HMAC-SHA256"
SIGNED_HEADERS: Final = ("x-user-id", "idempotency-key")
"""Headers that decide for whom and for which task a request is; an absent one is signed as empty."""

_FIELDS: Final = {
    "key": re.compile(r"[a-z0-9]{4,32}"),
    "timestamp": re.compile(r"[0-9]{1,12}"),
    "nonce": re.compile(r"[A-Za-z0-9_-]{16,64}"),
    "body": re.compile(r"[0-9a-f]{64}"),
    "signature": re.compile(r"[0-9a-f]{64}"),
}
_NONCE_BYTES: Final = 16


class MalformedSignatureError(ValueError):
    """The header is no signature of ours."""


@dataclass(frozen=True, kw_only=True)
class RequestSignature:
    """What the `Authorization` header of a signed request says."""

    key_id: str
    timestamp: int
    """Unix seconds."""
    nonce: str
    body_sha256: bytes
    signature: bytes = field(repr=False)

    @classmethod
    def parse(cls, credentials: str) -> Self:
        """Read what comes behind the scheme: each field once, in any order, and nothing else.

        Raises:
            MalformedSignatureError: it is anything else.
        """
        # No header of ours is longer; what is, is not worth splitting.
        parts = credentials.split(",", maxsplit=len(_FIELDS))
        found = dict(part.strip().partition("=")[::2] for part in parts)
        if len(parts) != len(_FIELDS) or found.keys() != _FIELDS.keys():
            raise MalformedSignatureError(f"needs {', '.join(_FIELDS)}, each once")
        for name, pattern in _FIELDS.items():
            if not pattern.fullmatch(found[name]):
                raise MalformedSignatureError(f"`{name}` is malformed")
        return cls(
            key_id=found["key"],
            timestamp=int(found["timestamp"]),
            nonce=found["nonce"],
            body_sha256=bytes.fromhex(found["body"]),
            signature=bytes.fromhex(found["signature"]),
        )


def string_to_sign(
    *,
    method: str,
    path: bytes,
    query: bytes,
    headers: Sequence[str],
    timestamp: int,
    nonce: str,
    body_sha256: bytes,
) -> bytes:
    """The bytes under the signature.

    Args:
        method: in capitals.
        path: as it is sent, percent-encoding included.
        query: as it is sent, without `?`; its parameters are sorted here.
        headers: values of `SIGNED_HEADERS`, in that order.
        timestamp: unix seconds.
        nonce: of this request.
        body_sha256: digest of the body, of no bytes where there is none.
    """
    lines = (
        SCHEME.encode(),
        method.encode(),
        path,
        b"&".join(sorted(query.split(b"&"))),
        *(header.encode("latin-1") for header in headers),
        str(timestamp).encode(),
        nonce.encode(),
        body_sha256.hex().encode(),
    )
    return b"\n".join(lines)


def sign(secret: str, text: bytes) -> bytes:
    """HMAC-SHA256 with a key's signing secret."""
    return hmac.digest(secret.encode("utf-8"), text, hashlib.sha256)


class RequestSigner(httpx.Auth):
    """Signs each request of an httpx client.

    Args:
        signing_key: `<key id>:<signing secret>`, as `reelgate keys create --signing` prints it.
        clock: unix seconds.

    Raises:
        MalformedSignatureError: `signing_key` is not of that shape; the message shows nothing of it.
    """

    requires_request_body = True

    def __init__(self, signing_key: str, *, clock: Callable[[], float] = time.time) -> None:
        self._key_id, _, self._secret = signing_key.strip().partition(":")
        if not _FIELDS["key"].fullmatch(self._key_id) or not self._secret:
            raise MalformedSignatureError("a signing key is `<key id>:<signing secret>`")
        self._clock = clock

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the signature."""
        path, _, query = request.url.raw_path.partition(b"?")
        timestamp, nonce = int(self._clock()), secrets.token_urlsafe(_NONCE_BYTES)
        body = hashlib.sha256(request.content).digest()
        text = string_to_sign(
            method=request.method,
            path=path,
            query=query,
            headers=[sent_header(request.headers.raw, name) for name in SIGNED_HEADERS],
            timestamp=timestamp,
            nonce=nonce,
            body_sha256=body,
        )
        request.headers["Authorization"] = (
            f"{SCHEME} key={self._key_id},timestamp={timestamp},nonce={nonce},"
            f"body={body.hex()},signature={sign(self._secret, text).hex()}"
        )
        yield request


def sent_header(raw: Sequence[tuple[bytes, bytes]], name: str) -> str:
    """A header's value byte for byte (as Latin-1); one that was sent twice gives both, so that nothing hides."""
    wanted = name.encode("ascii")
    return ",".join(value.decode("latin-1") for sent, value in raw if sent.lower() == wanted)
