"""Supervised child processes: restarts, order of stopping, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path

import pytest_asyncio

from workers.supervisor import Program, Supervisor


class Heard:
    """What a supervisor said."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.events: list[tuple[str, str]] = []

    def supervisor(self) -> Supervisor:
        return Supervisor(
            on_line=lambda program, line: self.lines.append((program, line)),
            on_event=lambda program, text: self.events.append((program, text)),
        )


def program(name: str, code: str, *, grace: float = 5, level: int = 0) -> Program:
    return Program(
        name=name,
        command=(sys.executable, "-u", "-c", code),
        environment=dict(os.environ),
        stop_grace=timedelta(seconds=grace),
        level=level,
    )


async def until(condition: Callable[[], bool], *, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


WAIT = "import time; print('up'); time.sleep(60)"
SAY_GOODBYE = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (print('bye'), sys.exit(0)))\n"
    "print('up')\ntime.sleep(60)"
)
IGNORE = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\ntime.sleep(60)"


class TestSupervisor:
    @pytest_asyncio.fixture
    async def heard(self) -> Heard:
        return Heard()

    @pytest_asyncio.fixture
    async def supervisor(self, heard: Heard) -> AsyncIterator[Supervisor]:
        supervisor = heard.supervisor()
        yield supervisor
        await supervisor.stop()

    async def test_a_killed_child_is_started_again_and_it_is_said(self, supervisor: Supervisor, heard: Heard) -> None:
        child = await supervisor.start(program("a", WAIT))
        await until(lambda: heard.lines == [("a", "up")])
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(heard.lines) == 2)
        assert child.restarts == 1
        assert child.pid != first
        assert heard.events == [("a", "ended with signal SIGKILL; starting again in 0.2 s")]

    async def test_a_child_that_fails_at_once_is_started_with_growing_pauses(
        self, supervisor: Supervisor, heard: Heard
    ) -> None:
        await supervisor.start(program("a", "import sys; sys.exit(7)"))
        await until(lambda: len(heard.events) == 3)
        assert [text for _, text in heard.events] == [
            f"ended with exit code 7; starting again in {pause} s" for pause in ("0.2", "0.5", "1")
        ]

    async def test_stopping_during_such_a_pause_ends_at_once(self, heard: Heard) -> None:
        supervisor = heard.supervisor()
        await supervisor.start(program("a", "import sys; sys.exit(7)"))
        await until(lambda: len(heard.events) == 3)
        began = time.monotonic()
        await supervisor.stop()
        assert time.monotonic() - began < 0.5

    async def test_children_are_stopped_level_by_level(self, heard: Heard) -> None:
        supervisor = heard.supervisor()
        for name, level in (("server", 0), ("worker", 1), ("api", 2)):
            await supervisor.start(program(name, SAY_GOODBYE, level=level))
        await until(lambda: len(heard.lines) == 3)
        await supervisor.stop()
        assert [name for name, line in heard.lines if line == "bye"] == ["api", "worker", "server"]
        assert heard.events == []

    async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(self, heard: Heard) -> None:
        supervisor = heard.supervisor()
        child = await supervisor.start(program("a", IGNORE, grace=0.3))
        await until(lambda: bool(heard.lines))
        pid = child.pid
        assert pid is not None
        await supervisor.stop()
        assert heard.events == [("a", "did not stop within 0.3 s; killed")]
        assert not alive(pid)

    async def test_what_a_killed_child_started_goes_with_it(self, supervisor: Supervisor, heard: Heard) -> None:
        code = (
            "import subprocess, sys, time\n"
            "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)\n"
            "time.sleep(60)"
        )
        child = await supervisor.start(program("a", code))
        await until(lambda: bool(heard.lines))
        grandchild = int(heard.lines[0][1])
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: not alive(grandchild))

    async def test_a_line_beyond_the_limit_does_not_stop_the_reading(
        self, supervisor: Supervisor, heard: Heard
    ) -> None:
        await supervisor.start(program("a", "print('x' * 3_000_000); print('after'); import time; time.sleep(60)"))
        await until(lambda: ("a", "after") in heard.lines)


def test_children_do_not_outlive_a_killed_supervisor() -> None:
    code = (
        "import asyncio, os, sys\n"
        "from datetime import timedelta\n"
        "from workers.supervisor import Program, Supervisor\n"
        "async def main():\n"
        "    supervisor = Supervisor(on_line=print, on_event=print)\n"
        "    command = (sys.executable, '-c', 'import time; time.sleep(60)')\n"
        "    child = await supervisor.start(Program(name='a', command=command,\n"
        "        environment=dict(os.environ), stop_grace=timedelta(seconds=1)))\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        child = int(running.stdout.readline())
        assert alive(child)
        running.kill()
        running.wait()
    give_up_at = time.monotonic() + 5
    while alive(child) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    assert not alive(child)
