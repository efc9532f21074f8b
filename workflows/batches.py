"""The words of a batch: what was posted, how far it is, and what one step of it asks of an activity.

A batch has up to a thousand items, so what it carries is kept small: one letter per item for its state, sixteen hex
digits for its content. The items themselves are an object in the store, and the ids of their tasks can be computed.
"""

# Without `from __future__ import annotations`: the converter resolves the annotations of every value that it decodes,
# and would compile each that is text.

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from workflows.failures import FailureCode
from workflows.states import TaskStatus
from workflows.tasks import AdmissionPlace, CallbackTarget, CancelMode, User

CONTENT_DIGITS: Final = 16
"""Hex digits per item in `BatchInput.contents`."""


class BatchStatus(StrEnum):
    """State of a batch on the wire."""

    PROCESSING = "PROCESSING"
    COMPLETED = "COMPLETED"
    """Every item was run to an end of its own, whichever."""
    CANCELED = "CANCELED"
    """The rest was cancelled: by its owner, an operator, the deadline, or because its items were lost."""


class ItemState(StrEnum):
    """State of an item as its batch knows it, one letter each."""

    REJECTED = "-"
    """It broke a rule and was skipped: there is no task."""
    CREATED = "C"
    OPEN = "O"
    """Its task has been started; the task itself knows whether it is QUEUED or PROCESSING."""
    SUCCEEDED = "S"
    FAILED = "F"
    TIMEOUT = "T"
    CANCELED = "X"


ENDED_ITEMS: Final[Mapping[TaskStatus, ItemState]] = MappingProxyType(
    {
        TaskStatus.SUCCEEDED: ItemState.SUCCEEDED,
        TaskStatus.FAILED: ItemState.FAILED,
        TaskStatus.TIMEOUT: ItemState.TIMEOUT,
        TaskStatus.CANCELED: ItemState.CANCELED,
    }
)
"""Item states by how their tasks ended."""


@dataclass(frozen=True, kw_only=True)
class ItemTask:
    """The task of an item."""

    index: int
    """Position in the batch as posted."""
    task_id: str
    link: int = 0
    """Position in the chain of the item's key: how many tasks of it had ended before."""


@dataclass(frozen=True, kw_only=True)
class OpenItem:
    """An item whose task has not ended."""

    task: ItemTask
    own: bool = True
    """This batch started it, so it will tell; False: it was found running."""
    told: CancelMode | None = None
    """The cancel that was passed on to it."""


@dataclass(frozen=True, kw_only=True)
class BatchRecord:
    """What a batch knows about itself: memo `record`, written after each step and at the end."""

    batch_id: str
    status: BatchStatus
    states: str
    """An `ItemState` per item as posted."""
    updated_at: datetime
    links: dict[str, int] = field(default_factory=dict)
    """Position in its chain for each started item (by index) that is not the first of it."""
    started: tuple[int, ...] = ()
    """Items that read CANCELED and have a task: they were started."""
    gpu_seconds: float = 0.0
    finished_at: datetime | None = None
    cancel_requested: CancelMode | None = None
    error_code: FailureCode | None = None
    """Why it was cancelled, when nobody asked for it."""
    callback_started: bool = False


@dataclass(frozen=True, kw_only=True)
class BatchState:
    """What a batch carries over continue-as-new."""

    record: BatchRecord
    open_items: tuple[OpenItem, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BatchInput:
    """Input of `BatchWorkflow`, and its memo `request`."""

    batch_id: str
    root_id: str
    """First batch of the chain; part of every item's key, so that done items answer for a later batch too."""
    user: User
    items_key: str
    """Object with the items: one line per item as posted, a `GenerationInput` as JSON, empty if rejected."""
    states: str
    """`CREATED` or `REJECTED` per item as posted."""
    contents: str
    """`CONTENT_DIGITS` hex digits per item as posted: the hash of what decides its task."""
    accepted_at: datetime
    deadline_seconds: float
    url: str
    """Where the batch is read; goes into the callback."""
    parallelism: int = 2
    """Tasks of the batch that are open at a time."""
    callback: CallbackTarget | None = None
    report_key: str | None = None
    """Object with the rules that rejected items broke; None: no item was rejected."""
    idempotency_key: str = ""
    fingerprint: str = ""
    retry_of: str | None = None
    places: tuple[AdmissionPlace, ...] = ()
    look_seconds: float = 60.0
    """After so long without news the open items are looked at; doubles up to five minutes."""
    continue_after_events: int = 0
    """0: when the server suggests it."""
    state: BatchState | None = None
    """None: a new batch."""


@dataclass(frozen=True, kw_only=True)
class BatchStep:
    """One step: learn how items stand, then start some."""

    batch_id: str
    items_key: str
    look: tuple[ItemTask, ...] = ()
    candidates: tuple[int, ...] = ()
    """Items to start, in order, until `free` of them are open. Those with an answer take no room."""
    free: int = 0


@dataclass(frozen=True, kw_only=True)
class ItemReading:
    """How an item stands."""

    task: ItemTask
    status: TaskStatus | None = None
    """How its task ended; None: it has not."""
    own: bool = True
    gpu_seconds: float = 0.0
    """What this batch spent on it."""


@dataclass(frozen=True, kw_only=True)
class BatchStepResult:
    """What was read: every item looked at, and each candidate that got its turn."""

    readings: tuple[ItemReading, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CancelItemsInput:
    """Cancel the tasks of open items."""

    task_ids: tuple[str, ...]
    mode: CancelMode


@dataclass(frozen=True, kw_only=True)
class RemoveItemsInput:
    """The batch has ended: its items, prompts included, are not needed any more."""

    items_key: str


def item_counts(states: str) -> dict[TaskStatus, int]:
    """Accepted items by state. Open ones count as QUEUED: only their tasks know better."""
    return {
        TaskStatus.CREATED: states.count(ItemState.CREATED),
        TaskStatus.QUEUED: states.count(ItemState.OPEN),
        TaskStatus.PROCESSING: 0,
        **{status: states.count(state) for status, state in ENDED_ITEMS.items()},
    }


def item_content(contents: str, index: int) -> str:
    """Content hash of one item."""
    return contents[index * CONTENT_DIGITS : (index + 1) * CONTENT_DIGITS]
