"""What the attempt loop may still do for one task: retries, requeues and the waits between them.

Pure bookkeeping over the class table of `failures.py`, so that every row can be tested without a server.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from workflows.failures import FAILURE_CLASSES, FailureCode, Remedy
from workflows.policies import retry_delay


@dataclass(frozen=True, kw_only=True)
class NextRound:
    """Another round is allowed, after `delay_seconds`."""

    delay_seconds: float


class AttemptBudget:
    """Counts what the failures of one task have cost.

    Args:
        max_attempts: attempts that cost budget, the first one included.
        max_requeues: queue timeouts that put the task back into the queue.
    """

    def __init__(self, *, max_attempts: int, max_requeues: int) -> None:
        self._max_attempts = max_attempts
        self._max_requeues = max_requeues
        self._last: FailureCode | None = None
        self._repeats = 0
        self.spent = 0
        """Failed attempts that cost budget."""
        self.requeues = 0
        self.retries = 0
        """Retries granted, free ones included."""

    def next_round(self, failure: FailureCode, random: Random) -> NextRound | None:
        """Charge a failure and say when the next round may start; None when this failure is the end."""
        row = FAILURE_CLASSES[failure]
        self._repeats = self._repeats + 1 if failure is self._last else 1
        self._last = failure
        if row.remedy is Remedy.FINAL:
            return None
        if row.remedy is Remedy.REQUEUE:
            if self.requeues >= self._max_requeues:
                return None
            self.requeues += 1
            return NextRound(delay_seconds=0.0)
        if row.costs_budget:
            self.spent += 1
            if self.spent >= self._max_attempts:
                return None
        self.retries += 1
        # Backoff grows with every attempt that cost budget, and with repeats of a free failure.
        repeats = self.spent if row.costs_budget else self._repeats
        return NextRound(delay_seconds=retry_delay(row.backoff, repeats, random))
