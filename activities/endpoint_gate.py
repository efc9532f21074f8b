"""Who may send to which endpoint now: concurrency, fair shares and a circuit breaker, per callback worker.

Nothing waits here. An endpoint that is busy or whose breaker is open is refused at once, with the time after which
to come again, so that a slow or dead receiver holds a few connections of its own and nobody else's.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from activities.delivery_errors import DeliveryError


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A tenant's exact callback URL, with the origin (scheme, host and port) that it shares with others."""

    tenant: str
    url: str
    origin: str


@dataclass(frozen=True, kw_only=True)
class BreakerRule:
    """Open after `failures` in a row, for `open_seconds` doubling to `max_open_seconds`; then one probe.

    Whoever is sent away meanwhile gets a turn of their own: not before `open_seconds`, `returns_per_second` of them,
    and all within `max_open_seconds`, however many they are.
    """

    failures: int = 5
    open_seconds: float = 30.0
    max_open_seconds: float = 300.0
    returns_per_second: float = 10.0
    """Each return costs the server two workflow tasks and an activity, which healthy endpoints wait for."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Requests under way at a time, within the connection pool of one worker.

    The origin's share is for receivers with a URL per task, to which each endpoint is a new one.
    """

    per_origin: int = 32
    per_tenant: int = 100


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Not now."""

    error: DeliveryError
    retry_in: float | None = None
    """Seconds until the breaker lets a probe through; None when busy."""


@dataclass(slots=True)
class _State:
    in_flight: int = 0
    failures: int = 0
    """In a row."""
    opened: int = 0
    """Times the breaker opened since the last success."""
    open_until: float = 0.0
    opened_at: float = 0.0
    """When the breaker opened for the first of these times."""
    probing: bool = False
    last_turn: float = 0.0
    """When the last of those sent away comes again."""


class EndpointGate:
    """State of the endpoints that are in use or failing; a healthy idle one takes no memory."""

    def __init__(
        self,
        *,
        breaker: BreakerRule | None = None,
        shares: Shares | None = None,
        max_endpoints: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._breaker = breaker or BreakerRule()
        self._shares = shares or Shares()
        self._max_endpoints = max_endpoints
        self._clock = clock
        self._states: OrderedDict[tuple[str, str], _State] = OrderedDict()
        self._origins: Counter[tuple[str, str]] = Counter()
        self._tenants: Counter[str] = Counter()

    @property
    def size(self) -> int:
        """Endpoints kept."""
        return len(self._states)

    @property
    def open_breakers(self) -> int:
        """Endpoints that have taken nothing since their breaker opened."""
        return sum(1 for state in self._states.values() if state.opened)

    @property
    def longest_open_seconds(self) -> float:
        """How long the breaker that opened first has been open, probes included; 0.0 when none is."""
        opened = [state.opened_at for state in self._states.values() if state.opened]
        return self._clock() - min(opened) if opened else 0.0

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return self._tenants.total()

    def refusal(self, endpoint: Endpoint) -> Refusal | None:
        """What the breaker alone says. Asked before a task joins a merge window, which needs no permit."""
        state = self._states.get(_key(endpoint))
        if state is None or not state.opened:
            return None
        remaining = state.open_until - self._clock()
        if remaining > 0 or state.probing:
            return Refusal(error=DeliveryError.BREAKER_OPEN, retry_in=self._turn(state, remaining))
        return None

    def _turn(self, state: _State, remaining: float) -> float:
        """Seconds until the next free turn at an endpoint whose breaker is open for `remaining` more seconds."""
        now, rule = self._clock(), self._breaker
        in_line = min(state.last_turn + 1.0 / rule.returns_per_second - now, rule.max_open_seconds)
        wait = max(remaining, rule.open_seconds, in_line)
        state.last_turn = now + wait
        return wait

    def enter(self, endpoint: Endpoint, concurrency: int) -> Permit | Refusal:
        """Take a place for one request, or hear when to come again."""
        refused = self.refusal(endpoint)
        if refused is not None:
            return refused
        key, origin = _key(endpoint), (endpoint.tenant, endpoint.origin)
        state = self._states.get(key) or _State()
        if (
            state.in_flight >= concurrency
            or self._origins[origin] >= self._shares.per_origin
            or self._tenants[endpoint.tenant] >= self._shares.per_tenant
        ):
            return Refusal(error=DeliveryError.ENDPOINT_BUSY)
        state.in_flight += 1
        # Past its open time the breaker lets one through, and what that one meets decides for all.
        state.probing = bool(state.opened)
        self._origins[origin] += 1
        self._tenants[endpoint.tenant] += 1
        self._states[key] = state
        self._states.move_to_end(key)
        self._forget_oldest()
        return Permit(self, endpoint, probe=state.probing)

    def leave(self, endpoint: Endpoint, *, probe: bool, alive: bool | None) -> None:
        """Give a place back, called by the permit. `alive` is None when nothing was learnt about the endpoint."""
        origin = (endpoint.tenant, endpoint.origin)
        self._origins[origin] -= 1
        self._tenants[endpoint.tenant] -= 1
        if not self._origins[origin]:
            del self._origins[origin]
        if not self._tenants[endpoint.tenant]:
            del self._tenants[endpoint.tenant]
        key = _key(endpoint)
        state = self._states[key]
        state.in_flight -= 1
        if probe:
            state.probing = False
        if alive:
            state.failures = state.opened = 0
        elif alive is not None:
            self._count_failure(state, probe=probe)
        if not state.in_flight and not state.failures:
            del self._states[key]

    def _count_failure(self, state: _State, *, probe: bool) -> None:
        state.failures += 1
        # Requests that were under way when the breaker opened say nothing new: only a probe opens it again.
        if probe or (not state.opened and state.failures >= self._breaker.failures):
            if not state.opened:
                state.opened_at = self._clock()
            state.opened += 1
            lasts = self._breaker.open_seconds * 2.0 ** min(state.opened - 1, 16)
            state.open_until = self._clock() + min(lasts, self._breaker.max_open_seconds)

    def _forget_oldest(self) -> None:
        while len(self._states) > self._max_endpoints:
            idle = next((key for key, state in self._states.items() if not state.in_flight), None)
            if idle is None:  # bounded by the worker's slots
                return
            del self._states[idle]


class Permit:
    """A place at an endpoint, given back at the end of the `with` block."""

    def __init__(self, gate: EndpointGate, endpoint: Endpoint, *, probe: bool) -> None:
        self._gate = gate
        self._endpoint = endpoint
        self._probe = probe
        self.alive: bool | None = None
        """Set before the end: whether the endpoint took the request. None leaves the breaker as it is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._gate.leave(self._endpoint, probe=self._probe, alive=self.alive)


def _key(endpoint: Endpoint) -> tuple[str, str]:
    return endpoint.tenant, endpoint.url
