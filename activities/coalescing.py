"""Items for one key that meet within a window leave together, and each gets its own result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Window:
    """How long and how much one group may collect."""

    seconds: float
    max_items: int
    max_bytes: int


@dataclass(slots=True, eq=False)
class _Group(Generic[T, R]):
    window: Window
    waiting: dict[asyncio.Future[R], T] = field(default_factory=dict)
    bytes: int = 0
    full: asyncio.Event = field(default_factory=asyncio.Event)


class Coalescer(Generic[K, T, R]):
    """Collects items by key and hands each group to `send`.

    The first item opens a window; it closes when its time is up or when it is full. `send` returns one result per
    item, in the order given. Nothing is kept beyond the open windows and the sends under way.
    """

    def __init__(self, send: Callable[[K, list[T]], Awaitable[list[R]]]) -> None:
        self._send = send
        self._open: dict[K, _Group[T, R]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def size(self) -> int:
        """Open windows."""
        return len(self._open)

    async def submit(self, key: K, item: T, size: int, window: Window) -> R:
        """Wait for the group that this item joins, and return the item's own result.

        A caller that is cancelled before the window closes takes its item out; afterwards it has gone with the rest.

        Args:
            key: what is merged: items of one key only.
            item: handed to `send`.
            size: bytes that count against the window's limit.
            window: taken from the item that opens the group.
        """
        group = self._open.get(key)
        if group is not None and group.bytes + size > group.window.max_bytes:
            self._close(key, group)
            group = None
        if group is None:
            group = self._open_group(key, window)
        mine: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        group.waiting[mine] = item
        group.bytes += size
        if len(group.waiting) >= group.window.max_items:
            self._close(key, group)
        try:
            return await mine
        finally:
            if self._open.get(key) is group:
                group.waiting.pop(mine, None)
                group.bytes -= size

    async def aclose(self) -> None:
        """Send what has been collected, and wait for it."""
        for key, group in list(self._open.items()):
            self._close(key, group)
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _open_group(self, key: K, window: Window) -> _Group[T, R]:
        group = _Group[T, R](window=window)
        self._open[key] = group
        task = asyncio.create_task(self._run(key, group), name="merge window")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return group

    def _close(self, key: K, group: _Group[T, R]) -> None:
        if self._open.get(key) is group:
            del self._open[key]
        group.full.set()

    async def _run(self, key: K, group: _Group[T, R]) -> None:
        try:
            async with asyncio.timeout(group.window.seconds):
                await group.full.wait()
        except TimeoutError:
            self._close(key, group)
        waiting = {future: item for future, item in group.waiting.items() if not future.done()}
        if not waiting:
            return
        try:
            results = await self._send(key, list(waiting.values()))
        except BaseException as error:
            for future in waiting:
                if not future.done():
                    future.set_exception(error if isinstance(error, Exception) else RuntimeError("merge window lost"))
            raise
        for future, result in zip(waiting, results, strict=True):
            if not future.done():
                future.set_result(result)
