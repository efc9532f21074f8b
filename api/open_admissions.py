"""Admissions that answered this process not long ago: they run, so an admit need not start them first.

A start on the way costs the server another look at the run and each request another input, for every submission.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from activities.memory import remember

FRESH_SECONDS: Final = 600.0
"""An idle admission closes after an hour; what is wrong here costs one more round trip and nothing else."""
MAX_REMEMBERED: Final = 10_000


class OpenAdmissions:
    """Workflow ids of admissions, the latest that answered."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard_at: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, admission_id: str) -> bool:
        heard_at = self._heard_at.get(admission_id)
        return heard_at is not None and self._clock() - heard_at < FRESH_SECONDS

    def note(self, admission_id: str) -> None:
        """It has just answered, whatever it said."""
        remember(self._heard_at, admission_id, self._clock(), at_most=MAX_REMEMBERED)

    def forget(self, admission_id: str) -> None:
        """It has closed."""
        self._heard_at.pop(admission_id, None)
