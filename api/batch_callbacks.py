"""The callback of a batch, as `api.deliveries` is for those of tasks."""

from __future__ import annotations

from dataclasses import dataclass

from api.auth import Caller
from api.batch_jobs import BatchJob
from api.batches import Batches
from api.deliveries import Deliveries, DeliveryState
from api.problems import BatchNotTerminalError, CallbackNotFoundError
from api.terminal_events import event_of_batch


@dataclass(frozen=True, kw_only=True)
class BatchCallbacks:
    """Reads and repeats the callbacks of batches."""

    batches: Batches
    deliveries: Deliveries

    async def read(self, caller: Caller, batch_id: str) -> list[DeliveryState]:
        """Every delivery of the caller's batch, oldest first; at least one.

        Raises:
            BatchNotFoundError: there is no such batch, or it is another user's.
            CallbackNotFoundError: it has no callback (yet).
            TemporalUnavailableError: no answer in time.
        """
        job = await self.batches.fresh(caller, batch_id)
        found = await self.deliveries.of(batch_id)
        if not found:
            raise CallbackNotFoundError(_why_none(job))
        return found

    async def redeliver(self, caller: Caller, batch_id: str) -> list[DeliveryState]:
        """Send `batch.completed` again, or at once when its delivery still waits.

        Raises:
            BatchNotFoundError: there is no such batch, or it is another user's.
            BatchNotTerminalError: it has not ended, so there is nothing to tell yet.
            CallbackNotFoundError: it has no receiver, or was ended from outside.
            TemporalUnavailableError: no answer in time.
        """
        job = await self.batches.fresh(caller, batch_id)
        event = event_of_batch(job)
        if event is None:
            if not job.has_ended:
                raise BatchNotTerminalError("The batch has not ended: there is nothing to deliver yet.")
            raise CallbackNotFoundError(_why_none(job))
        await self.deliveries.send_again(event, await self.deliveries.of(batch_id))
        return await self.deliveries.of(batch_id)


def _why_none(job: BatchJob) -> str:
    if job.request.callback is None:
        return "The batch was submitted without a callback_url."
    if not job.has_ended:
        return "The batch has not ended: its callback goes out then."
    if job.record is None or job.record.finished_at is None:
        return "The batch was ended from outside, which sends no callback."
    return "The delivery of the batch is older than the retention."
