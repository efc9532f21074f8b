"""What a batch knows of its items: states, open tasks, what is to be done next. Pure bookkeeping, no commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import islice
from typing import Final

from workflows.batches import (
    ENDED_ITEMS,
    BatchInput,
    BatchRecord,
    BatchState,
    BatchStatus,
    BatchStep,
    ItemReading,
    ItemState,
    OpenItem,
)
from workflows.failures import FailureCode
from workflows.tasks import CancelMode

MAX_CANDIDATES: Final = 50
"""Items per step at most; those of an earlier batch that are done already answer by the dozen."""


class BatchLedger:
    """The account of one batch."""

    def __init__(self, given: BatchInput) -> None:
        self._given = given
        record = given.state.record if given.state else None
        self._states = list(record.states if record else given.states)
        self._links = dict(record.links) if record else {}
        self._started = list(record.started) if record else []
        self._gpu_seconds = record.gpu_seconds if record else 0.0
        self._open = {item.task.index: item for item in given.state.open_items} if given.state else {}
        self._heard: set[str] = set()
        self._look_at_all = given.state is not None
        self.changes = 0
        """Counts what has become known."""

    @property
    def is_over(self) -> bool:
        """Every item has ended."""
        return not self._open and not self.has_created

    @property
    def has_created(self) -> bool:
        """Some item waits for its turn."""
        return ItemState.CREATED in self._states

    @property
    def has_adopted(self) -> bool:
        """Some open task was found running: its end is not told to this batch."""
        return any(not item.own for item in self._open.values())

    @property
    def has_canceled(self) -> bool:
        """Some item is CANCELED."""
        return ItemState.CANCELED in self._states

    def hear(self, task_id: str) -> None:
        """A task says that it has ended. It may say so before the step that started it is known to be done."""
        self._heard.add(task_id)

    def look_at_all(self) -> None:
        """Look at every open item in the next step."""
        self._look_at_all = True

    def next_step(self, *, may_start: bool) -> BatchStep | None:
        """What to do next; None: nothing but to wait."""
        heard = [item for item in self._open.values() if item.task.task_id in self._heard]
        looked_at = list(self._open.values()) if self._look_at_all else heard
        free = self._given.parallelism - (len(self._open) - len(heard)) if may_start else 0
        created = (index for index, state in enumerate(self._states) if state == ItemState.CREATED)
        candidates = tuple(islice(created, MAX_CANDIDATES)) if free > 0 else ()
        if not looked_at and not candidates:
            return None
        return BatchStep(
            batch_id=self._given.batch_id,
            items_key=self._given.items_key,
            look=tuple(item.task for item in looked_at),
            candidates=candidates,
            free=max(0, free),
        )

    def settle(self, step: BatchStep, readings: Sequence[ItemReading]) -> None:
        """Take what a step has learned."""
        if self._look_at_all and len(step.look) == len(self._open):
            self._look_at_all = False
        for task in step.look:
            self._heard.discard(task.task_id)
        for reading in readings:
            self._settle_item(reading)

    def _settle_item(self, reading: ItemReading) -> None:
        task = reading.task
        if reading.status is not None:
            self._open.pop(task.index, None)
            self._heard.discard(task.task_id)
            self._states[task.index] = ENDED_ITEMS[reading.status]
            self._gpu_seconds += reading.gpu_seconds
            if ENDED_ITEMS[reading.status] is ItemState.CANCELED:
                self._started.append(task.index)
        elif task.index not in self._open:
            self._open[task.index] = OpenItem(task=task, own=reading.own)
            self._states[task.index] = ItemState.OPEN
        else:
            return
        if task.link:
            self._links[str(task.index)] = task.link
        self.changes += 1

    def cancel_rest(self) -> None:
        """Items that have not been started will not be."""
        created, canceled = ItemState.CREATED.value, ItemState.CANCELED.value
        self._states = [canceled if state == created else state for state in self._states]

    def untold(self, mode: CancelMode) -> tuple[OpenItem, ...]:
        """Open items that have not been told to stop in this way, or in the harder one."""
        return tuple(item for item in self._open.values() if item.told not in (mode, CancelMode.HARD))

    def tell(self, items: Sequence[OpenItem], mode: CancelMode) -> None:
        """They are told."""
        for item in items:
            self._open[item.task.index] = replace(item, told=mode)

    def state(self, record: BatchRecord) -> BatchState:
        """What to carry over."""
        return BatchState(record=record, open_items=tuple(self._open.values()))

    def record(self, at: datetime, *, cancel: CancelMode | None, error: FailureCode | None) -> BatchRecord:
        """The record as of `at`."""
        return BatchRecord(
            batch_id=self._given.batch_id,
            status=BatchStatus.PROCESSING,
            states="".join(self._states),
            updated_at=at,
            links=dict(self._links),
            started=tuple(sorted(self._started)),
            gpu_seconds=self._gpu_seconds,
            cancel_requested=cancel,
            error_code=error,
        )
