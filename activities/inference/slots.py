"""Activity slots of a GPU worker: a slot is given out only together with the lease of a free, healthy device.

The slot is reserved before the worker polls, so no task is ever held by a worker that cannot run it: it stays in the
queue, where another worker or a later task of higher priority can take its turn.
"""

from __future__ import annotations

import asyncio
import weakref

from temporalio.worker import (
    CustomSlotSupplier,
    SlotMarkUsedContext,
    SlotPermit,
    SlotReleaseContext,
    SlotReserveContext,
)

from activities.inference.leases import Leases


class LeasePermit(SlotPermit):
    """A permit that came with a lease."""

    def __init__(self, leases: Leases, loop: asyncio.AbstractEventLoop) -> None:
        # A finalizer runs once, by `end` or when the object goes: at shutdown the worker may lose a permit unseen.
        self.end = weakref.finalize(self, _end_permit, leases, loop)
        self.end.atexit = False


class LeaseSlotSupplier(CustomSlotSupplier):
    """Slots over the leases of a pool. Create it, and the worker, in the pool's event loop."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._loop = asyncio.get_running_loop()

    async def reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit:
        """Wait for a lease."""
        await self._leases.reserve()
        return LeasePermit(self._leases, self._loop)

    def try_reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit | None:
        """Nothing runs eagerly on a GPU queue: workflows live in other workers."""
        return None

    def mark_slot_used(self, ctx: SlotMarkUsedContext) -> None:
        """Nothing to note: the activity takes its lease itself."""

    def release_slot(self, ctx: SlotReleaseContext) -> None:
        """End the permit. Called from a thread of the SDK, for used and unused permits alike."""
        if isinstance(ctx.permit, LeasePermit):
            ctx.permit.end()


def _end_permit(leases: Leases, loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(leases.end_permit)
