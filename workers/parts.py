"""What a worker polls and runs, as the registry hands it over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import CollectorRegistry
from temporalio.worker import CustomSlotSupplier, FixedSizeSlotSupplier, Interceptor, WorkerTuner

WORKFLOW_SLOTS: Final = 20
"""Of a control worker for workflow tasks, and of a callback worker for those that hold no local attempt. Few: one
process works on them one by one, so a task that it has taken ahead of its turn no longer yields to those that the queue
would put first, among them the admits that people wait for."""


def _alive() -> Mapping[str, object]:
    return {"ready": True}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One kind of worker, ready to poll."""

    task_queue: str
    workflows: Sequence[type] = ()
    activities: Sequence[Callable[..., Any]] = ()
    tuner: WorkerTuner | None = None
    """Slots per kind of work; None: the SDK's defaults."""
    state: Callable[[], Mapping[str, object]] = _alive
    """What the health port shows; `ready` decides its status."""
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)
    """The worker's own series."""
    interceptors: Sequence[Interceptor] = ()


def activity_slots(supplier: CustomSlotSupplier) -> WorkerTuner:
    """Slots for a worker that runs activities only."""
    unused = FixedSizeSlotSupplier(1)
    return WorkerTuner.create_composite(
        workflow_supplier=unused, activity_supplier=supplier, local_activity_supplier=unused, nexus_supplier=unused
    )


def control_slots() -> WorkerTuner:
    """Slots for a control worker."""
    return WorkerTuner.create_fixed(workflow_slots=WORKFLOW_SLOTS)


def callback_slots(attempts: int, local_attempts: int) -> WorkerTuner:
    """Slots for a callback worker with so many delivery attempts at a time, and so many inside workflow tasks.

    Those hold the slot of their workflow task as long as they take.
    """
    return WorkerTuner.create_fixed(workflow_slots=WORKFLOW_SLOTS + local_attempts, activity_slots=attempts)
