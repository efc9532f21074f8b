"""Names are asked for rarely, once at a time, and answered through a resolver outage for an hour at most."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address

import pytest

from activities.dns_cache import DnsCache, NameNotFoundError, ResolverUnavailableError, SystemResolver
from activities.egress_policy import Address

FIRST = (ip_address("1.1.1.1"),)
SECOND = (ip_address("9.9.9.9"), ip_address("2620:fe::fe"))


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class ScriptedResolver:
    """Answers with what `answer` holds: addresses, or an error to raise."""

    def __init__(self) -> None:
        self.answer: tuple[Address, ...] | Exception = FIRST
        self.asked: list[str] = []
        self.delay = 0.0

    async def __call__(self, name: str) -> tuple[Address, ...]:
        self.asked.append(name)
        await asyncio.sleep(self.delay)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def resolver() -> ScriptedResolver:
    return ScriptedResolver()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(resolver: ScriptedResolver, clock: Clock) -> DnsCache:
    return DnsCache(resolver, ttl=60, stale_if_error=3_600, error_ttl=5, lookup_timeout=0.2, max_names=3, clock=clock)


async def test_answer_is_used_until_its_time_is_up(cache: DnsCache, resolver: ScriptedResolver, clock: Clock) -> None:
    assert await cache.resolve("a.example") == FIRST
    resolver.answer = SECOND
    clock.now += 59
    assert await cache.resolve("a.example") == FIRST
    clock.now += 1
    assert await cache.resolve("a.example") == SECOND
    assert resolver.asked == ["a.example", "a.example"]


async def test_case_and_trailing_dot_name_the_same_host(cache: DnsCache, resolver: ScriptedResolver) -> None:
    await cache.resolve("A.Example.")
    await cache.resolve("a.example")
    assert resolver.asked == ["a.example"]


async def test_failing_resolver_leaves_the_last_answer_for_an_hour(
    cache: DnsCache, resolver: ScriptedResolver, clock: Clock
) -> None:
    await cache.resolve("a.example")
    resolver.answer = OSError("no resolver")
    clock.now += 3_599
    assert await cache.resolve("a.example") == FIRST
    clock.now += 2
    with pytest.raises(ResolverUnavailableError):
        await cache.resolve("a.example")


async def test_failing_resolver_is_not_asked_for_every_request(
    cache: DnsCache, resolver: ScriptedResolver, clock: Clock
) -> None:
    await cache.resolve("a.example")
    resolver.answer = OSError("no resolver")
    clock.now += 61
    for _ in range(10):
        await cache.resolve("a.example")
    assert len(resolver.asked) == 2
    clock.now += 5
    resolver.answer = SECOND
    assert await cache.resolve("a.example") == SECOND


async def test_hanging_resolver_counts_as_failed(cache: DnsCache, resolver: ScriptedResolver, clock: Clock) -> None:
    await cache.resolve("a.example")
    clock.now += 61
    resolver.delay = 30
    assert await asyncio.wait_for(cache.resolve("a.example"), 2) == FIRST
    with pytest.raises(ResolverUnavailableError):
        await cache.resolve("never-seen.example")


async def test_name_that_is_gone_is_not_served_stale(cache: DnsCache, resolver: ScriptedResolver, clock: Clock) -> None:
    await cache.resolve("a.example")
    clock.now += 61
    resolver.answer = NameNotFoundError("a.example")
    with pytest.raises(NameNotFoundError):
        await cache.resolve("a.example")
    clock.now += 6
    resolver.answer = OSError("no resolver")
    with pytest.raises(ResolverUnavailableError):
        await cache.resolve("a.example")


async def test_empty_answer_is_no_such_name(cache: DnsCache, resolver: ScriptedResolver) -> None:
    resolver.answer = ()
    with pytest.raises(NameNotFoundError):
        await cache.resolve("a.example")


async def test_simultaneous_questions_are_asked_once(cache: DnsCache, resolver: ScriptedResolver) -> None:
    resolver.delay = 0.02
    answers = await asyncio.gather(*(cache.resolve("a.example") for _ in range(50)))
    assert set(answers) == {FIRST}
    assert resolver.asked == ["a.example"]


async def test_giving_up_waiting_takes_the_answer_from_nobody(cache: DnsCache, resolver: ScriptedResolver) -> None:
    resolver.delay = 0.05
    impatient = asyncio.create_task(cache.resolve("a.example"))
    patient = asyncio.create_task(cache.resolve("a.example"))
    await asyncio.sleep(0.01)
    impatient.cancel()
    assert await patient == FIRST


async def test_only_the_newest_names_are_kept(cache: DnsCache, resolver: ScriptedResolver) -> None:
    for name in ("a", "b", "c", "a", "d"):
        await cache.resolve(f"{name}.example")
    assert cache.size == 3
    resolver.asked.clear()
    await cache.resolve("a.example")
    assert resolver.asked == []
    await cache.resolve("b.example")
    assert resolver.asked == ["b.example"]


async def test_failing_names_take_no_more_room_than_good_ones(cache: DnsCache, resolver: ScriptedResolver) -> None:
    resolver.answer = OSError("no resolver")
    for number in range(20):
        with pytest.raises(ResolverUnavailableError):
            await cache.resolve(f"{number}.example")
    assert cache.size == 3


async def test_system_resolver_knows_this_machine_and_no_invalid_name() -> None:
    system = SystemResolver(threads=1)
    try:
        assert ip_address("127.0.0.1") in await system("localhost")
        with pytest.raises((NameNotFoundError, OSError)):
            await system("no-such-name.invalid")
    finally:
        system.close()
