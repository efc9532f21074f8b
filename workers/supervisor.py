"""Child processes of `reelgate dev`: started in order, restarted when they crash, stopped in order.

Each child leads a session of its own, so that Ctrl-C in a terminal reaches the supervisor only, which then stops
the children in order; and is tethered, so that none outlives a killed supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

from workers import tether

BACKOFF_SECONDS: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses before a crashed child is started again; from the first one again after a steady minute."""
_STEADY_SECONDS: Final = 60.0
_LINE_LIMIT: Final = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Program:
    """One child: what to run and how long it may take to stop."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    stop_grace: timedelta
    """After SIGTERM; then its whole process group is killed."""
    level: int = 0
    """Programs of the highest level are stopped first, together; what others rely on has a low one."""


@dataclass(kw_only=True)
class Child:
    """A program under supervision."""

    program: Program
    pid: int | None = None
    """Process id while it runs."""
    restarts: int = 0
    task: asyncio.Task[None] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class _Started:
    process: asyncio.subprocess.Process
    output: int
    """Reading end of the pipe that it writes to."""


class Supervisor:
    """Keeps programs running until they are stopped."""

    def __init__(self, *, on_line: Callable[[str, str], None], on_event: Callable[[str, str], None]) -> None:
        """Prepare.

        Args:
            on_line: takes (program, line) for each line a child writes.
            on_event: takes (program, text) when a child starts, crashes or is killed.
        """
        self._on_line = on_line
        self._on_event = on_event
        self._children: dict[str, Child] = {}
        self._stopping = asyncio.Event()

    @property
    def children(self) -> Mapping[str, Child]:
        """Children by name, in the order they were started."""
        return self._children

    async def start(self, program: Program) -> Child:
        """Start a program and keep it running."""
        child = self._children[program.name] = Child(program=program)
        started = await self._spawn(child)
        child.task = asyncio.create_task(self._supervise(child, started), name=f"supervise {program.name}")
        return child

    async def stop(self) -> None:
        """Stop all children level by level; each gets its grace, then its process group is killed."""
        self._stopping.set()
        for level in sorted({child.program.level for child in self._children.values()}, reverse=True):
            await asyncio.gather(
                *(self._stop(child) for child in self._children.values() if child.program.level == level)
            )

    def kill(self) -> None:
        """Kill all children and their process groups now."""
        self._stopping.set()
        for child in self._children.values():
            _signal_group(child.pid, signal.SIGKILL)

    async def _spawn(self, child: Child) -> _Started:
        program = child.program
        launcher = (sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid()))
        # A pipe of our own: asyncio's would keep `wait` waiting for whatever else holds it open.
        output, written = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *launcher,
                *program.command,
                env=dict(program.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=written,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(written)
        child.pid = process.pid
        return _Started(process=process, output=output)

    async def _supervise(self, child: Child, started: _Started) -> None:
        quick_ends = 0
        while True:
            began = time.monotonic()
            code = await self._outlive(child, started)
            if self._stopping.is_set():
                return
            quick_ends = 0 if time.monotonic() - began > _STEADY_SECONDS else quick_ends + 1
            pause = BACKOFF_SECONDS[min(max(quick_ends - 1, 0), len(BACKOFF_SECONDS) - 1)]
            self._on_event(child.program.name, f"ended with {_exit_text(code)}; starting again in {pause:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), timeout=pause)
            if self._stopping.is_set():
                return
            child.restarts += 1
            started = await self._spawn(child)
            if self._stopping.is_set():
                _signal(child.pid, signal.SIGTERM)

    async def _outlive(self, child: Child, started: _Started) -> int:
        """Pass the child's lines on until it ends; then end what it left in its process group."""
        reading = asyncio.create_task(self._read(child.program.name, started.output))
        code = await started.process.wait()
        _signal_group(child.pid, signal.SIGKILL)
        child.pid = None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reading, timeout=2)
        return code

    async def _read(self, name: str, output: int) -> None:
        reader = asyncio.StreamReader(limit=_LINE_LIMIT)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb", buffering=0)
        )
        try:
            while line := await _next_line(reader):
                self._on_line(name, line.decode("utf-8", errors="replace").rstrip())
        finally:
            transport.close()

    async def _stop(self, child: Child) -> None:
        if child.task is None:
            return
        _signal(child.pid, signal.SIGTERM)
        done, _ = await asyncio.wait([child.task], timeout=child.program.stop_grace.total_seconds())
        if not done:
            self._on_event(
                child.program.name, f"did not stop within {child.program.stop_grace.total_seconds():g} s; killed"
            )
            _signal_group(child.pid, signal.SIGKILL)
            await asyncio.wait([child.task])


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    """The next line, or nothing at the end. One beyond the limit is dropped piece by piece, as asyncio does."""
    while True:
        try:
            return await reader.readline()
        except ValueError:
            continue


def _signal(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _signal_group(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
