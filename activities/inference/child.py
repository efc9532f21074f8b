"""Starts, talks to and ends one inference process.

A plain `exec` of the interpreter, not `multiprocessing`: that would import the worker's own main module in the
child, and everything that it imports.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Final

from activities.inference.messages import FromProcess, ToProcess, framed, read_message

_PROCESS_MODULE: Final = "activities.inference.process"
_PRIVATE_PREFIXES: Final = ("REELGATE_", "TEMPORAL_", "AWS_")
"""Settings and credentials of the worker: nothing that the child needs."""

_EXIT_SECONDS: Final = 1.0
"""For a process that closed its channel to exit by itself."""


class ChildEndedError(Exception):
    """The process is gone; the message says how."""


class Child:
    """One running inference process."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, *, threads: int | None) -> Child:
        """Start a process. It sends nothing before it was sent a `Configure`.

        Raises:
            OSError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # Started by the thread of the event loop: the kernel kills the child when that thread ends.
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    _PROCESS_MODULE,
                    str(theirs.fileno()),
                    str(os.getpid()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    env=_environment(threads),
                )
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: ToProcess) -> None:
        """Send a message; one to a process that is gone is lost."""
        if not self._writer.is_closing():
            self._writer.write(framed(message))

    async def receive(self) -> FromProcess:
        """The next message.

        Raises:
            ChildEndedError: the process is gone.
        """
        try:
            return await read_message(self._reader)
        except EOFError:
            # It may be exiting with a code that says more than our signal.
            with suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_SECONDS):
                    raise ChildEndedError(await self.ended()) from None
            raise ChildEndedError(await self.end()) from None

    async def end(self) -> str:
        """Kill the process if it still runs, wait until it is gone, and say how it ended.

        SIGKILL, because nothing less ends a process that was stopped or hangs in a driver.
        """
        with suppress(ProcessLookupError):
            self._process.kill()
        self._writer.close()
        return await self.ended()

    async def ended(self) -> str:
        """Wait until the process is gone, and say how it ended."""
        code = await self._process.wait()
        return f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _environment(threads: int | None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_PRIVATE_PREFIXES)}
    offline_and_quiet = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        # Below "error" both print parts of prompts that are too long.
        "TRANSFORMERS_VERBOSITY": "error",
        "DIFFUSERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return inherited | offline_and_quiet | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
