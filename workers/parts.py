"""What a worker polls and runs, as the registry hands it over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from temporalio.worker import CustomSlotSupplier, FixedSizeSlotSupplier, WorkerTuner


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


def activity_slots(supplier: FixedSizeSlotSupplier | CustomSlotSupplier) -> WorkerTuner:
    """Slots for a worker that runs activities only."""
    unused = FixedSizeSlotSupplier(1)
    return WorkerTuner.create_composite(
        workflow_supplier=unused, activity_supplier=supplier, local_activity_supplier=unused, nexus_supplier=unused
    )
