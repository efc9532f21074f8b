"""The request-rate guard in front of every route: a polling storm or a script costs a look-up and nothing behind it.

Requests are counted per API key, else per address, in this process only: with n replicas a client can have n times
the rate. Only a key that is live counts as one, so that made-up keys do not open new accounts. The exact limits of
submissions are the admission's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final

from limits import RateLimitItemPerSecond
from limits.strategies import MovingWindowRateLimiter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.middleware import header
from api.problems import RateLimitedError, UnauthenticatedError
from api.request_signing import SCHEME
from api.request_windows import RequestWindows

EXEMPT: Final = frozenset({"/healthz"})
"""A supervisor must not take a busy process for a dead one."""
GUARDED_KEY: Final = "reelgate.guarded_key"
"""Where the request's scope has the live key of a bearer token, for `KnownAnswers`."""
_NETWORK_BITS: Final = 64
"""Of an IPv6 address: whoever has one usually has all that share these."""


class RequestGuard:
    """Refuses requests over a rate with 429 `RATE_LIMITED`, before they are authenticated or their body is read.

    Args:
        app: what is guarded.
        rate_per_second: sustained rate.
        burst: requests in one go; rounded up to what the rate gives in whole seconds.
        trusted_proxies: addresses or networks whose `X-Forwarded-For` is believed.
        on_refusal: hears of each refusal, as `key` or `address`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        rate_per_second: float,
        burst: int,
        trusted_proxies: Iterable[str] = (),
        on_refusal: Callable[[str], None] | None = None,
    ) -> None:
        self._app = app
        self._on_refusal = on_refusal
        window = max(1, math.ceil(burst / rate_per_second))
        amount = max(1, round(rate_per_second * window))
        self._limit = RateLimitItemPerSecond(amount, window)
        self._limiter = MovingWindowRateLimiter(RequestWindows())
        self._address = _client_address(trusted_proxies)
        self._policy = f'"requests";q={amount};w={window}'.encode()
        self._detail = f"At most {rate_per_second:g} requests per second, {amount} in one go."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http" or scope["path"] in EXEMPT:
            await self._app(scope, receive, send)
            return
        who = self._who(scope)
        allowed = self._limiter.hit(self._limit, who)
        stats = self._limiter.get_window_stats(self._limit, who)
        # When the oldest counted request leaves the window.
        reset = max(1, math.ceil(stats.reset_time - time.time()))
        headers = [
            (b"ratelimit-policy", self._policy),
            (b"ratelimit", f'"requests";r={max(0, stats.remaining)};t={reset}'.encode()),
        ]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        if allowed:
            await self._app(scope, receive, send_with_headers)
        else:
            if self._on_refusal is not None:
                self._on_refusal(who.partition(" ")[0])
            refusal = RateLimitedError(self._detail, retry_after_seconds=reset)
            await refusal.response()(scope, receive, send_with_headers)

    def _who(self, scope: Scope) -> str:
        scheme, _, token = header(scope, b"authorization").partition(" ")
        if scheme.lower() == "bearer":
            key = scope["state"]["keys"].authenticate(token.strip())
            if key is not None:
                scope[GUARDED_KEY] = key
                return f"key {key.key_id}"
        elif scheme.upper() == SCHEME:
            with suppress(UnauthenticatedError):
                return f"key {scope['state']['signatures'].signed(scope, token).key.key_id}"
        peer = scope.get("client")
        return f"address {self._address(peer[0] if peer else '', header(scope, b'x-forwarded-for'))}"


def _client_address(trusted_proxies: Iterable[str]) -> Callable[[str, str], str]:
    """How to find whom a connection is for: what the nearest proxy that we do not trust says it is, or is itself."""
    trusted = tuple(map(ip_network, trusted_proxies))

    @lru_cache(maxsize=4096)
    def is_trusted(address: str) -> bool:
        try:
            parsed = ip_address(address)
        except ValueError:
            return False
        return any(parsed in network for network in trusted)

    def address(peer: str, forwarded: str) -> str:
        if trusted:
            # Each proxy appends whom it heard from: read from the right, up to the first that is not ours.
            hops = [hop.strip() for hop in forwarded.split(",") if hop.strip()]
            while hops and is_trusted(peer):
                peer = hops.pop()
        return _network(peer)

    return address


@lru_cache(maxsize=4096)
def _network(address: str) -> str:
    try:
        parsed = ip_address(address)
    except ValueError:
        return address[:64]
    if not isinstance(parsed, IPv6Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ip_network((parsed, _NETWORK_BITS), strict=False))
