"""Checking signed requests: the signature first, then its time, then that its nonce was not used here before.

All of it needs the headers alone, so a stranger makes us read no body. What was used is remembered by each replica
for itself: on another one, or after a restart, a caught request can be repeated while its time is good.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Scope

from api.problems import UnauthenticatedError
from api.request_signing import (
    SCHEME,
    SIGNED_HEADERS,
    MalformedSignatureError,
    RequestSignature,
    sent_header,
    sign,
    string_to_sign,
)
from workers.keys import ApiKey, KeyRing

TOLERANCE: Final = timedelta(minutes=5)
"""How far the time of a request may be from ours, in either direction."""
MAX_NONCES: Final = 10_000
"""Nonces remembered per key, more than the request guard's default rate lets through while they count."""

_NOBODYS_SECRET: Final = "an unknown key costs as much time as a known one"  # noqa: S105 - signs nothing


@dataclass(frozen=True, kw_only=True)
class SignedRequest:
    """A request whose signature is good."""

    key: ApiKey
    signature: RequestSignature


@dataclass(kw_only=True)
class _Seen:
    """Nonces of one key."""

    nonces: set[str] = field(default_factory=set)
    by_time: list[tuple[int, str]] = field(default_factory=list)
    """Heap, the oldest first."""
    floor: int = 0
    """Only requests signed after this can still be told from replays."""


class UsedNonces:
    """What was used, in bounded memory: over the bound the oldest are forgotten, and with them their whole time."""

    def __init__(self, *, max_per_key: int = MAX_NONCES) -> None:
        self._max_per_key = max_per_key
        self._seen: dict[str, _Seen] = {}

    def __len__(self) -> int:
        return sum(len(seen.nonces) for seen in self._seen.values())

    def use(self, key_id: str, nonce: str, *, signed_at: int, now: float) -> bool:
        """Use a nonce; False: it was used before, or is too old to tell."""
        over = int(now - TOLERANCE.total_seconds()) - 1
        if key_id not in self._seen:
            self._drop_idle(over)
        seen = self._seen.setdefault(key_id, _Seen())
        self._forget(seen, until=over)
        if nonce in seen.nonces or signed_at <= seen.floor:
            return False
        seen.nonces.add(nonce)
        heapq.heappush(seen.by_time, (signed_at, nonce))
        if len(seen.by_time) > self._max_per_key:
            self._forget(seen, until=seen.by_time[0][0])
        return True

    def _drop_idle(self, over: int) -> None:
        for key_id, seen in list(self._seen.items()):
            self._forget(seen, until=over)
            if not seen.nonces:
                del self._seen[key_id]

    def _forget(self, seen: _Seen, *, until: int) -> None:
        seen.floor = max(seen.floor, until)
        while seen.by_time and seen.by_time[0][0] <= until:
            seen.nonces.discard(heapq.heappop(seen.by_time)[1])


class SignatureCheck:
    """Finds who signed a request.

    Args:
        keys: with signing secrets.
        clock: unix seconds.
        nonces: what was used on this replica.
    """

    def __init__(
        self, keys: KeyRing, *, clock: Callable[[], float] = time.time, nonces: UsedNonces | None = None
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._nonces = nonces or UsedNonces()

    def signed(self, scope: Scope, credentials: str) -> SignedRequest:
        """Check a signature and its time. The nonce is not used up yet, and the body not read.

        Args:
            scope: the request.
            credentials: what the `Authorization` header has behind the scheme.

        Raises:
            UnauthenticatedError: malformed, unknown key, wrong signature, or out of time.
        """
        try:
            signature = RequestSignature.parse(credentials)
        except MalformedSignatureError as error:
            raise UnauthenticatedError(f"`Authorization: {SCHEME} ...` {error}.") from None
        key = self._keys.find(signature.key_id)
        secret = key.signing_secret if key is not None else None
        expected = sign(secret or _NOBODYS_SECRET, _text(scope, signature))
        good = hmac.compare_digest(expected, signature.signature)
        if key is None or secret is None or not good:
            raise UnauthenticatedError("The key is unknown or may not sign, or the signature is wrong.")
        off = signature.timestamp - self._clock()
        if abs(off) > TOLERANCE.total_seconds():
            raise UnauthenticatedError(
                f"The request was signed {abs(off):.0f} s {'after' if off > 0 else 'before'} our time; "
                f"at most {TOLERANCE.total_seconds():.0f} s are allowed."
            )
        return SignedRequest(key=key, signature=signature)

    def use(self, request: SignedRequest) -> ApiKey:
        """Use a request's nonce up; the key that signed it.

        Raises:
            UnauthenticatedError: it was used before.
        """
        signature = request.signature
        if not self._nonces.use(signature.key_id, signature.nonce, signed_at=signature.timestamp, now=self._clock()):
            raise UnauthenticatedError("The nonce was used before; each request needs a new one.")
        return request.key


async def with_checked_body(request: Request, signature: RequestSignature) -> Request:
    """The request with its body read and found to be the one that was signed; hashed as it comes in.

    Raises:
        UnauthenticatedError: it is another body.
    """
    digest = hashlib.sha256()

    async def receive() -> Message:
        message = await request.receive()
        digest.update(message.get("body", b""))
        return message

    checked = Request(request.scope, receive)
    try:
        await checked.body()
    except ClientDisconnect:
        raise UnauthenticatedError("The body did not arrive.") from None
    if not hmac.compare_digest(digest.digest(), signature.body_sha256):
        raise UnauthenticatedError("The body is not the one that was signed.")
    return checked


def _text(scope: Scope, signature: RequestSignature) -> bytes:
    return string_to_sign(
        method=scope["method"],
        path=scope["raw_path"],
        query=scope["query_string"],
        headers=[sent_header(scope["headers"], name) for name in SIGNED_HEADERS],
        timestamp=signature.timestamp,
        nonce=signature.nonce,
        body_sha256=signature.body_sha256,
    )
