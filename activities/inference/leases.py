"""Who may use a device: leases, taken before a task is polled, one for each activity slot that is held.

A slot permit and a lease are reserved together. The activity that starts takes any reserved lease, gives it back when
its frames are in host memory, and keeps its permit until it has encoded and stored the clip. Permits that end unused
take a lease back with them. The count that makes a leak impossible: the leases waiting to be taken plus the
activities that took one are never more than the permits held.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from activities.inference.device import InferenceDevice


class NoLeaseError(Exception):
    """An activity started without a reserved lease: the worker does not use the lease slot supplier."""


class Lease:
    """The right to use one device. Giving it back twice is fine."""

    def __init__(self, device: InferenceDevice, on_release: Callable[[], None]) -> None:
        self.device = device
        device.leased = True
        self._on_release = on_release
        self._held = True

    def release(self) -> None:
        """Give the device back."""
        if self._held:
            self._held = False
            self.device.leased = False
            self._on_release()


class Leases:
    """The leases of a pool's devices. Used by one event loop."""

    def __init__(self, devices: Sequence[InferenceDevice], *, slots: int) -> None:
        self.devices = tuple(devices)
        self.slots = slots
        """Most permits at a time."""
        self._permits = 0
        self._reserved: deque[Lease] = deque()
        self._taken = 0
        self._changed = asyncio.Event()

    @property
    def permits(self) -> int:
        """Permits held."""
        return self._permits

    def changed(self) -> None:
        """Wake whoever waits: a device or a permit may have become free."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def reserve(self) -> None:
        """Wait for a free permit and a free, healthy device, and reserve both."""
        while (device := self._free_device()) is None:
            await self._changed.wait()
        self._permits += 1
        self._reserved.append(Lease(device, self.changed))

    def _free_device(self) -> InferenceDevice | None:
        if self._permits >= self.slots:
            return None
        return next((device for device in self.devices if device.ready and not device.leased), None)

    def end_permit(self) -> None:
        """A permit ended; if no activity took its lease, the lease ends too."""
        self._permits -= 1
        if self._reserved and len(self._reserved) + self._taken > self._permits:
            self._unhealthiest().release()
        self.changed()

    @contextmanager
    def take(self) -> Iterator[Lease]:
        """A reserved lease, of a healthy device if there is one; given back at the end at the latest.

        Raises:
            NoLeaseError: none is reserved.
        """
        if not self._reserved:
            raise NoLeaseError("no lease is reserved for this activity")
        lease = next((lease for lease in self._reserved if lease.device.ready), self._reserved[0])
        self._reserved.remove(lease)
        self._taken += 1
        try:
            yield lease
        finally:
            self._taken -= 1
            lease.release()

    def _unhealthiest(self) -> Lease:
        lease = next((lease for lease in self._reserved if not lease.device.ready), self._reserved[-1])
        self._reserved.remove(lease)
        return lease
