"""What the end of a task or of a batch has to tell its receiver, for a delivery that is asked for afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from api.batch_jobs import BatchJob
from api.jobs import Job
from workflows.batch import batch_callback_input
from workflows.outbox import callback_input
from workflows.tasks import CallbackInput, User


@dataclass(frozen=True, kw_only=True)
class TerminalEvent:
    """A terminal event, and whose it is."""

    given: CallbackInput
    user: User

    @property
    def of(self) -> str:
        """Id of the task or batch."""
        return self.given.task_id


def event_of_task(job: Job) -> TerminalEvent | None:
    """The event of a job that decided on its end and whose owner asked to hear of it; else None."""
    request, record = job.request, job.record
    if request.callback is None or record is None or not record.callback_started:
        return None
    return TerminalEvent(given=callback_input(request, request.callback, record), user=request.user)


def event_of_batch(job: BatchJob) -> TerminalEvent | None:
    """The event of a batch that came to its own end and was given a receiver; else None."""
    request, record = job.request, job.record
    if request.callback is None or record is None or not record.callback_started:
        return None
    return TerminalEvent(given=batch_callback_input(request, request.callback, record), user=request.user)
