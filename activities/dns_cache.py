"""Names resolved for outgoing requests: cached, asked for once at a time, and served stale through a resolver outage.

A stale answer is only an answer: whoever connects still checks every address in it. That a name does not exist
is an answer too, and drops what was known before.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from activities.egress_policy import Address
from activities.memory import remember

Resolver = Callable[[str], Awaitable[tuple[Address, ...]]]
"""Addresses of a name, best first. Raises `NameNotFoundError`; anything else it raises is an outage."""

_NO_SUCH_NAME: Final = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})


class NameNotFoundError(Exception):
    """The name does not exist, or has no address."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no address for {name}")


class ResolverUnavailableError(Exception):
    """The resolver failed and no answer young enough is known."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the resolver failed for {name}")


class SystemResolver:
    """The operating system's resolver, in threads of its own.

    A lookup that hangs can be left but not stopped; in the loop's shared pool a few of them would stop every other
    user of that pool.
    """

    def __init__(self, *, threads: int = 16) -> None:
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="resolver")

    async def __call__(self, name: str) -> tuple[Address, ...]:
        """Resolve a name to its IPv4 and IPv6 addresses, in the order in which the system prefers them."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._pool, _look_up, name)
        except socket.gaierror as error:
            if error.errno in _NO_SUCH_NAME:
                raise NameNotFoundError(name) from error
            raise
        # A scoped address (fe80::1%eth0) is link-local; without its zone it is still refused as that.
        return tuple(ip_address(address.partition("%")[0]) for address in dict.fromkeys(found))

    def close(self) -> None:
        """Let idle threads go; lookups under way are not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _look_up(name: str) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]


@dataclass(slots=True)
class _Entry:
    addresses: tuple[Address, ...] | None
    """None: only failures so far."""
    resolved_at: float
    fresh_until: float
    missing: bool = False


class DnsCache:
    """A bounded cache before a resolver.

    Args:
        resolver: asked on a miss, once per name at a time.
        ttl: seconds an answer is used without asking again; the system's resolver tells no TTL of its own.
        stale_if_error: seconds after the lookup for which an answer is served while the resolver fails.
        error_ttl: seconds before a resolver that failed for a name is asked for it again.
        lookup_timeout: seconds after which a lookup counts as failed.
        max_names: names kept; the least recently used goes first.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        resolver: Resolver,
        *,
        ttl: float = 60.0,
        stale_if_error: float = 3_600.0,
        error_ttl: float = 5.0,
        lookup_timeout: float = 2.5,
        max_names: int = 4_096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolver = resolver
        self._ttl = ttl
        self._stale_if_error = stale_if_error
        self._error_ttl = error_ttl
        self._lookup_timeout = lookup_timeout
        self._max_names = max_names
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lookups: dict[str, asyncio.Task[_Entry]] = {}

    @property
    def size(self) -> int:
        """Names kept."""
        return len(self._entries)

    async def resolve(self, name: str) -> tuple[Address, ...]:
        """Addresses of a name, from the cache or the resolver.

        Raises:
            NameNotFoundError: the resolver says that there is none.
            ResolverUnavailableError: it failed, and the last good answer is too old or there was none.
        """
        name = name.lower().rstrip(".")
        entry = self._entries.get(name)
        if entry is None or self._clock() >= entry.fresh_until:
            entry = await self._shared_lookup(name)
        else:
            self._entries.move_to_end(name)
        if entry.missing:
            raise NameNotFoundError(name)
        if entry.addresses is None or self._clock() >= entry.resolved_at + max(self._stale_if_error, self._ttl):
            raise ResolverUnavailableError(name)
        return entry.addresses

    async def _shared_lookup(self, name: str) -> _Entry:
        lookup = self._lookups.get(name)
        if lookup is None:
            lookup = asyncio.create_task(self._look_up(name), name=f"resolve {name}")
            self._lookups[name] = lookup
            lookup.add_done_callback(lambda _: self._lookups.pop(name, None))
        # Shielded: whoever gives up waiting must not take the answer away from the others.
        return await asyncio.shield(lookup)

    async def _look_up(self, name: str) -> _Entry:
        try:
            async with asyncio.timeout(self._lookup_timeout):
                addresses = await self._resolver(name)
            missing = not addresses
        except NameNotFoundError:
            addresses, missing = (), True
        except Exception:  # whatever a resolver raises is the outage that this cache is for
            return self._keep_stale(name)
        now = self._clock()
        fresh_for = self._error_ttl if missing else self._ttl
        return self._store(name, _Entry(addresses, now, now + fresh_for, missing))

    def _keep_stale(self, name: str) -> _Entry:
        now = self._clock()
        known = self._entries.get(name)
        retry_at = now + self._error_ttl
        if known is None or known.missing:
            return self._store(name, _Entry(None, now, retry_at))
        return self._store(name, _Entry(known.addresses, known.resolved_at, retry_at))

    def _store(self, name: str, entry: _Entry) -> _Entry:
        remember(self._entries, name, entry, at_most=self._max_names)
        return entry
