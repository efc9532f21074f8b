"""HTTP to URLs that clients name, without letting them reach what only this machine can reach.

The check sits in the transport, on the address that is really connected to: a name is resolved once, every address
of the answer is checked, and the connection goes to a checked address, while SNI, certificate check and `Host` keep
the name. A second, different DNS answer has no one to fool. Redirects are not followed, proxies and other settings
of the environment are not read, cookies are not kept, and replies are bounded in time and in bytes after
decompression.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final

import httpcore
import httpx
from httpcore import AnyIOBackend, AsyncNetworkBackend, AsyncNetworkStream

from activities.dns_cache import DnsCache
from activities.egress_policy import Address, EgressPolicy, UrlRefusedError, literal_address

__all__ = [
    "AddressRefusedError",
    "BoundedReply",
    "EgressPolicy",
    "FetchError",
    "GuardedClient",
    "GuardedTransport",
    "UrlRefusedError",
]

MAX_REPLY_BYTES: Final = 64 * 1024
_MAX_ADDRESSES_TRIED: Final = 4
_INFLATABLE: Final = frozenset({"gzip", "x-gzip", "deflate"})

SocketOption = tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]


class AddressRefusedError(Exception):
    """A name has an address that this gateway must not connect to."""

    def __init__(self, host: str, address: Address, reason: str) -> None:
        super().__init__(f"{host} resolves to {address}: {reason}")
        self.reason = reason


class FetchError(Exception):
    """A URL could not be fetched; `code` is stable, the message is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class BoundedReply:
    """A reply as far as it was read."""

    status_code: int
    headers: Mapping[str, str]
    body: bytes
    complete: bool
    """False: longer than the limit, too slow, broken off, or not decodable."""


class GuardedBackend(AsyncNetworkBackend):
    """Resolves, checks and connects; everything above it only ever sees the name."""

    def __init__(self, policy: EgressPolicy, dns: DnsCache, *, plain_http: bool) -> None:
        self._policy = policy
        self._dns = dns
        self._plain_http = plain_http
        self._inner = AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[SocketOption] | None = None,
    ) -> AsyncNetworkStream:
        """Connect to a checked address of `host` within `timeout` seconds, resolving included.

        Raises:
            AddressRefusedError: at least one address is refused; then none is connected to.
            NameNotFoundError, ResolverUnavailableError: see `DnsCache.resolve`.
            httpcore.ConnectError, httpcore.ConnectTimeout: no address answered.
        """
        until = None if timeout is None else time.monotonic() + timeout
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._checked_addresses(host, port)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(f"resolving {host} took too long") from error
        tried = addresses[:_MAX_ADDRESSES_TRIED]
        for position, address in enumerate(tried):
            share = None if until is None else max(until - time.monotonic(), 0.0) / (len(tried) - position)
            try:
                return await self._inner.connect_tcp(str(address), port, share, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if position == len(tried) - 1:
                    raise
        raise httpcore.ConnectError(f"{host} has no address")

    async def _checked_addresses(self, host: str, port: int) -> tuple[Address, ...]:
        literal = literal_address(host)
        addresses = (literal,) if literal is not None else await self._dns.resolve(host)
        for address in addresses:
            refused = self._policy.refusal(address, port, plain_http=self._plain_http)
            if refused is not None:
                raise AddressRefusedError(host, address, refused)
        return addresses

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[SocketOption] | None = None
    ) -> AsyncNetworkStream:
        """Never: a URL names no socket of this machine."""
        raise httpcore.ConnectError("unix sockets are refused")

    async def sleep(self, seconds: float) -> None:
        """Wait between connection retries (which are off)."""
        await asyncio.sleep(seconds)


class GuardedTransport(httpx.AsyncHTTPTransport):
    """httpx's own transport over a pool with the guarded backend; checks the URL of every request again."""

    def __init__(
        self, policy: EgressPolicy, dns: DnsCache, *, ssl_context: ssl.SSLContext | None, limits: httpx.Limits
    ) -> None:
        # Not calling the parent: all it does is build the pool, and it offers no place for a network backend.
        self._policy = policy
        # A backend is not told the scheme, so plain HTTP gets a transport without TLS, and the other way round.
        self._scheme = "http" if ssl_context is None else "https"
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=GuardedBackend(policy, dns, plain_http=ssl_context is None),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request.

        Raises:
            UrlRefusedError, AddressRefusedError: the guard; everything else as httpx.
        """
        self._policy.check_parsed(request.url)
        if request.url.scheme != self._scheme:
            raise UrlRefusedError("scheme", f"this transport is for {self._scheme}")
        return await super().handle_async_request(request)


class GuardedClient:
    """An HTTP client for URLs that clients name.

    Args:
        policy: what may be connected to.
        dns: resolves the names; not closed with the client.
        ssl_context: for receivers with a private certificate authority; the usual public ones by default.
        user_agent: sent with every request.
        max_connections, max_keepalive: of the pool.
        connect_timeout: seconds for resolving and TCP, and again for TLS.
        pool_timeout: seconds to wait for a free connection.
    """

    def __init__(
        self,
        policy: EgressPolicy,
        dns: DnsCache,
        *,
        ssl_context: ssl.SSLContext | None = None,
        user_agent: str = "reelgate",
        max_connections: int = 200,
        max_keepalive: int = 50,
        connect_timeout: float = 3.0,
        pool_timeout: float = 1.0,
    ) -> None:
        self.policy = policy
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_keepalive)
        ssl_context = ssl_context or httpx.create_ssl_context(trust_env=False)
        self._client = httpx.AsyncClient(
            transport=GuardedTransport(policy, dns, ssl_context=ssl_context, limits=limits),
            mounts={"http://": GuardedTransport(policy, dns, ssl_context=None, limits=limits)},
            trust_env=False,
            follow_redirects=False,
            # A jar that takes nothing: a receiver must not be able to mark, or fill, later requests to its host.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            headers={"user-agent": user_agent, "accept": "*/*", "accept-encoding": "identity"},
            timeout=httpx.Timeout(None, connect=connect_timeout, pool=pool_timeout),
        )

    async def aclose(self) -> None:
        """Close the pool."""
        await self._client.aclose()

    async def exchange(
        self,
        method: str,
        url: httpx.URL,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        timeout: float = 10.0,
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> BoundedReply:
        """Send one request and read its reply, all within `timeout` seconds.

        A reply whose status line has come is an answer, however its body ends; see `BoundedReply.complete`.

        Raises:
            TimeoutError: no status line in time.
            UrlRefusedError, AddressRefusedError, NameNotFoundError, ResolverUnavailableError, httpx.TransportError
        """
        request = self._client.build_request(method, url, headers=headers, content=content)
        answered: tuple[httpx.Response, _Body] | None = None
        complete = False
        try:
            async with asyncio.timeout(timeout):
                response = await self._client.send(request, stream=True)
                body = _Body(max_reply_bytes, response.headers.get("content-encoding", ""))
                answered = response, body
                try:
                    complete = await body.read(response)
                finally:
                    await response.aclose()
        except (TimeoutError, httpx.TransportError):
            if answered is None:
                raise
        response, body = answered
        return BoundedReply(
            status_code=response.status_code, headers=response.headers, body=bytes(body.read_so_far), complete=complete
        )

    async def fetch_bounded(self, url: str, *, max_bytes: int, timeout: float = 10.0) -> BoundedReply:
        """GET a URL whole.

        Raises:
            FetchError: `code` is `URL_REFUSED`, `ADDRESS_REFUSED`, `UNREACHABLE`, `TIMEOUT`, `REDIRECT`,
                `HTTP_STATUS`, `TOO_LARGE` or `INCOMPLETE`.
        """
        try:
            reply = await self.exchange(
                "GET", self.policy.check_url(url), timeout=timeout, max_reply_bytes=max_bytes + 1
            )
        except UrlRefusedError as error:
            raise FetchError("URL_REFUSED", str(error)) from error
        except AddressRefusedError as error:
            # The address itself would tell what this network looks like from inside.
            raise FetchError("ADDRESS_REFUSED", f"the host's address is {error.reason}") from error
        except (TimeoutError, httpx.TimeoutException) as error:
            raise FetchError("TIMEOUT", f"no answer within {timeout:g} s") from error
        except Exception as error:
            raise FetchError("UNREACHABLE", "the host could not be reached") from error
        if reply.status_code != httpx.codes.OK:
            code = "REDIRECT" if httpx.codes.is_redirect(reply.status_code) else "HTTP_STATUS"
            raise FetchError(code, f"the host answered {reply.status_code}")
        if len(reply.body) > max_bytes:
            raise FetchError("TOO_LARGE", f"more than {max_bytes} bytes")
        if not reply.complete:
            raise FetchError("INCOMPLETE", "the answer broke off, was too slow or could not be decoded")
        return reply


class _Body:
    """Reads a body piece by piece and inflates no more of it than the limit allows, so that a bomb stays small."""

    def __init__(self, limit: int, encoding: str) -> None:
        self.read_so_far = bytearray()
        self._limit = limit
        encoding = encoding.strip().lower()
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 32) if encoding in _INFLATABLE else None
        self._readable = self._inflate is not None or encoding in ("", "identity")

    async def read(self, response: httpx.Response) -> bool:
        """Return whether the whole body was read."""
        async for piece in response.aiter_raw():
            room = self._limit - len(self.read_so_far)
            if self._inflate is None:
                self.read_so_far += piece[:room]
                rest = len(piece) > room
            else:
                try:
                    self.read_so_far += self._inflate.decompress(piece, max(room, 1))[:room]
                except zlib.error:
                    return False
                rest = bool(self._inflate.unconsumed_tail)
            if rest or room <= 0:
                return False
        return self._readable and (self._inflate is None or self._inflate.eof)
