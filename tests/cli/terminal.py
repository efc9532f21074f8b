"""A command on a terminal of its own, as a person runs it: with colours, and bars that move."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from tests.cli.stack import REELGATE

_ROWS, _COLUMNS = 40, 200
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """One running command, and what its terminal has shown so far."""

    def __init__(self, process: subprocess.Popen[bytes], screen: int) -> None:
        self._process = process
        self._screen = screen
        self._shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def seen(self) -> str:
        """Everything that was ever shown, without colours and movements of the cursor."""
        return _CONTROL.sub("", self._shown.decode("utf-8", "replace"))

    async def until(self, text: str, *, seconds: float = 30) -> None:
        """Wait until a text was shown."""
        give_up_at = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < give_up_at, f"{text!r} was not shown: {self.seen}"
            await asyncio.sleep(0.05)

    async def ended(self) -> int:
        """Wait for the end of the command; its exit code."""
        code = await asyncio.to_thread(self._process.wait, 60)
        await asyncio.to_thread(self._reader.join, 10)
        return code

    def _read(self) -> None:
        # A terminal whose last process is gone answers EIO.
        with suppress(OSError):
            while piece := os.read(self._screen, 65_536):
                self._shown += piece


@contextmanager
def terminal(*arguments: str, environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Run one `reelgate` command on a terminal."""
    screen, command_side = pty.openpty()
    fcntl.ioctl(command_side, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    process = subprocess.Popen(
        [*REELGATE, *arguments],
        env={**environment, "TERM": "xterm-256color"},
        stdin=command_side,
        stdout=command_side,
        stderr=command_side,
        start_new_session=True,
    )
    os.close(command_side)
    try:
        yield Terminal(process, screen)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
        os.close(screen)
