"""The requests of the last seconds, per client, as the `limits` library's moving window wants them kept.

The library's own memory store walks every client a hundred times per second, in a thread that it starts for each
walk; under a polling storm that costs more than the answers. Here a request costs the same however many there are.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from limits.storage import MemoryStorage

SWEEP_SECONDS: Final = 10.0
"""How often clients that went silent are forgotten."""


@dataclass(slots=True)
class _Window:
    seconds: int
    times: deque[float] = field(default_factory=deque)
    """When the requests came that were let through, oldest first."""

    def drop_before(self, moment: float) -> None:
        while self.times and self.times[0] < moment:
            self.times.popleft()


class RequestWindows(MemoryStorage):
    """Exact moving windows; for one event loop, hence without locks."""

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[str, _Window] = {}
        self._sweep_at = time.time() + SWEEP_SECONDS

    @property
    def clients(self) -> int:
        """Clients that are remembered."""
        return len(self._windows)

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Count `amount` requests of a client, unless that would be more than `limit` in `expiry` seconds."""
        now = time.time()
        self._sweep(now)
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = _Window(seconds=expiry)
        window.drop_before(now - expiry)
        if len(window.times) + amount > limit:
            return False
        window.times.extend([now] * amount)
        return True

    def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        """When the oldest counted request of a client came, and how many there are."""
        now = time.time()
        window = self._windows.get(key)
        if window is None:
            return now, 0
        window.drop_before(now - expiry)
        return (window.times[0], len(window.times)) if window.times else (now, 0)

    def _sweep(self, now: float) -> None:
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_SECONDS
        for key, window in list(self._windows.items()):
            window.drop_before(now - window.seconds)
            if not window.times:
                del self._windows[key]
