"""The moving windows behind the request guard."""

from __future__ import annotations

import pytest

from api import request_windows
from api.request_windows import RequestWindows


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(request_windows, "time", clock)
    return clock


def test_no_window_of_that_length_has_more_than_the_limit(clock: Clock) -> None:
    windows = RequestWindows()
    let_through: list[float] = []
    for step in range(1_000):
        clock.now = 1_000 + step * 0.07
        if windows.acquire_entry("a", 10, 5):
            let_through.append(clock.now)
    assert all(sum(moment <= other < moment + 5 for other in let_through) <= 10 for moment in let_through)
    assert len(let_through) > 130, "nobody is kept out for longer than it takes"


def test_refused_requests_do_not_count_and_clients_do_not_share(clock: Clock) -> None:
    windows = RequestWindows()
    assert [windows.acquire_entry("a", 2, 5) for _ in range(4)] == [True, True, False, False]
    assert windows.get_moving_window("a", 2, 5) == (1_000.0, 2)
    assert windows.acquire_entry("b", 2, 5)
    assert windows.get_moving_window("nobody", 2, 5) == (1_000.0, 0)


def test_silent_clients_are_forgotten(clock: Clock) -> None:
    windows = RequestWindows()
    for number in range(50):
        windows.acquire_entry(f"client {number}", 2, 5)
    assert windows.clients == 50
    clock.now += 11
    windows.acquire_entry("another", 2, 5)
    assert windows.clients == 1
