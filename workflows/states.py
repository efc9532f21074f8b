"""The states of a task and the one table of legal moves between them.

Nothing else decides whether a move is legal: the workflow asks `move` before each change, and the tests walk
the whole table. A state is *terminal* for a client when the run behind it is closed; `CANCELED` of a
soft-cancelled task is the one state that a run can leave again (a revive) while it is still open.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class TaskStatus(StrEnum):
    """State of a task, as shown on the wire and in the search attribute `TaskStatus`."""

    CREATED = "CREATED"
    """A batch item whose job has not started."""
    QUEUED = "QUEUED"
    PROCESSING = "PROCESSING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    CANCELED = "CANCELED"


_S = TaskStatus

TRANSITIONS: Mapping[TaskStatus, frozenset[TaskStatus]] = MappingProxyType(
    {
        _S.CREATED: frozenset({_S.QUEUED, _S.CANCELED}),
        # SUCCEEDED straight from QUEUED: the artifact was found, no GPU was used.
        _S.QUEUED: frozenset({_S.PROCESSING, _S.SUCCEEDED, _S.FAILED, _S.TIMEOUT, _S.CANCELED}),
        # QUEUED again: from the end of an attempt to the start of the next one.
        _S.PROCESSING: frozenset({_S.QUEUED, _S.SUCCEEDED, _S.FAILED, _S.TIMEOUT, _S.CANCELED}),
        _S.SUCCEEDED: frozenset(),
        _S.FAILED: frozenset(),
        _S.TIMEOUT: frozenset(),
        # The revive of a soft-cancelled task whose generation still runs.
        _S.CANCELED: frozenset({_S.PROCESSING}),
    }
)

OPEN = frozenset({_S.CREATED, _S.QUEUED, _S.PROCESSING})
ENDED = frozenset({_S.SUCCEEDED, _S.FAILED, _S.TIMEOUT, _S.CANCELED})


class IllegalTransitionError(Exception):
    """A move that the transition table does not have. Seeing one is a bug in the workflow."""

    def __init__(self, source: TaskStatus, target: TaskStatus) -> None:
        super().__init__(f"illegal task transition {source} -> {target}")
        self.source = source
        self.target = target


def move(source: TaskStatus, target: TaskStatus) -> TaskStatus:
    """Return `target` if the table allows `source -> target`.

    Raises:
        IllegalTransitionError: the table does not have this move.
    """
    if target not in TRANSITIONS[source]:
        raise IllegalTransitionError(source, target)
    return target
