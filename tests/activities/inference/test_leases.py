"""No count of permits, takers and failures may leave a device leased that nobody uses."""

from __future__ import annotations

import asyncio
import gc
from contextlib import ExitStack
from random import Random
from typing import cast

import pytest
from temporalio.worker import SlotReserveContext

from activities.inference.device import InferenceDevice
from activities.inference.leases import Lease, Leases, NoLeaseError
from activities.inference.slots import LeaseSlotSupplier
from tests.scale import scaled


class Device:
    """What leases look at of a device."""

    def __init__(self) -> None:
        self.ready = True
        self.leased = False


def leases_of(devices: list[Device], slots: int) -> Leases:
    return Leases(cast("list[InferenceDevice]", devices), slots=slots)


async def reserved_in(leases: Leases, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await leases.reserve()
    except TimeoutError:
        return False
    return True


async def test_a_reservation_waits_for_a_healthy_device() -> None:
    device = Device()
    device.ready = False
    leases = leases_of([device], 2)
    waiting = asyncio.create_task(leases.reserve())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    device.ready = True
    leases.changed()
    await asyncio.wait_for(waiting, 1)
    assert device.leased


async def test_the_device_serves_the_next_permit_while_the_first_still_encodes() -> None:
    leases = leases_of([Device()], 2)
    await leases.reserve()
    assert not await reserved_in(leases, 0.01)
    with leases.take() as lease:
        lease.release()
        assert await reserved_in(leases, 1)
        assert leases.permits == 2


async def test_permits_are_bounded_by_the_slots() -> None:
    leases = leases_of([Device()], 2)
    with ExitStack() as stack:
        for _ in range(2):
            await leases.reserve()
            stack.enter_context(leases.take()).release()
        assert not await reserved_in(leases, 0.01)
        leases.end_permit()
        assert await reserved_in(leases, 1)


async def test_an_unused_permit_takes_its_lease_back() -> None:
    device = Device()
    leases = leases_of([device], 2)
    await leases.reserve()
    leases.end_permit()
    assert not device.leased
    assert leases.permits == 0


async def test_a_lease_nobody_reserved_cannot_be_taken() -> None:
    with pytest.raises(NoLeaseError), leases_of([Device()], 2).take():
        pass


async def test_a_healthy_device_is_taken_before_one_that_restarts() -> None:
    devices = [Device(), Device()]
    leases = leases_of(devices, 3)
    await leases.reserve()
    await leases.reserve()
    devices[0].ready = False
    with leases.take() as lease:
        assert cast("object", lease.device) is devices[1]


class History:
    """A worker's life, drawn at random: permits come, activities take leases, give them back early or late, and end."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.devices = [Device() for _ in range(self.random.randint(1, 3))]
        self.leases = leases_of(self.devices, self.random.randint(1, 5))
        self.running: list[tuple[ExitStack, Lease]] = []
        self.unused = 0
        """Permits that no activity uses yet."""
        self.finished = 0
        """Permits whose activity has ended."""

    async def reserve(self) -> None:
        self.unused += await reserved_in(self.leases, 0)

    async def start(self) -> None:
        if self.unused:
            stack = ExitStack()
            self.running.append((stack, stack.enter_context(self.leases.take())))
            self.unused -= 1

    async def release(self) -> None:
        if self.running:
            self.random.choice(self.running)[1].release()

    async def finish(self) -> None:
        if self.running:
            self.running.pop(self.random.randrange(len(self.running)))[0].close()
            self.finished += 1

    async def end_finished(self) -> None:
        if self.finished:
            self.finished -= 1
            self.leases.end_permit()

    async def end_unused(self) -> None:
        if self.unused:
            self.unused -= 1
            self.leases.end_permit()

    async def change_health(self) -> None:
        device = self.random.choice(self.devices)
        device.ready = not device.ready
        self.leases.changed()

    async def live(self) -> None:
        events = [self.reserve, self.start, self.release, self.finish, self.end_finished, self.end_unused]
        for _ in range(60):
            await self.random.choice([*events, self.change_health])()
            assert self.leases.permits == self.unused + self.finished + len(self.running)
            assert self.leased() <= self.leases.permits
        while self.running:
            await self.finish()
        for _ in range(self.leases.permits):
            self.leases.end_permit()

    def leased(self) -> int:
        return sum(device.leased for device in self.devices)


async def test_random_histories_never_leak_a_lease() -> None:
    for seed in range(scaled(500)):
        history = History(seed)
        await history.live()
        assert history.leased() == 0


async def test_a_permit_that_the_worker_loses_gives_its_lease_back() -> None:
    device = Device()
    leases = leases_of([device], 2)
    supplier = LeaseSlotSupplier(leases)
    permit = await supplier.reserve_slot(cast("SlotReserveContext", None))
    assert leases.permits == 1
    del permit
    gc.collect()
    await asyncio.sleep(0)
    assert not device.leased
    assert not leases.permits
