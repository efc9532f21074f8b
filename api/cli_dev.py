"""`reelgate dev`: the whole gateway on this machine, in one terminal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TextIO

from rich.text import Text

from api.cli_output import EXIT_INTERRUPTED, out
from api.dev_stack import DevStack, Ports, running_stack
from workers.supervisor import Supervisor
from workers.telemetry import console_renderer

_COLOURS: Final[Mapping[str, str]] = {
    "temporal": "magenta",
    "control": "blue",
    "callback": "yellow",
    "gpu": "green",
    "api": "cyan",
}
_SERIOUS: Final = frozenset({"ERROR", "FATAL"})
"""What the terminal shows of the Temporal server, which warns a lot; the file has all of it."""
_ROUTINE: Final = frozenset({200, 206, 304})
_WIDTH: Final = max(map(len, _COLOURS))


async def run_dev(*, data_dir: Path, port: int, temporal_port: int, ui_port: int) -> int:
    """Run until SIGINT or SIGTERM, then stop everything in order. A second signal kills everything at once.

    Raises:
        ConfigurationError: it could not start; the message says why.
    """
    with LogLines(data_dir / "logs") as lines:
        supervisor = Supervisor(on_line=lines.line, on_event=lines.event)
        asked_to_stop = _cancel_on_signal(supervisor, lines)
        try:
            async with running_stack(
                data_dir, Ports(api=port, temporal=temporal_port, ui=ui_port), supervisor
            ) as stack:
                _welcome(stack, logs=data_dir / "logs")
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not asked_to_stop.is_set():
                raise
    out.print("stopped", style="bold")
    return 0


def _cancel_on_signal(supervisor: Supervisor, lines: LogLines) -> asyncio.Event:
    """Turn the first signal into a cancel of this task, whether it still starts or runs already."""
    asked = asyncio.Event()
    loop, running = asyncio.get_running_loop(), asyncio.current_task()

    def stop() -> None:
        if asked.is_set():
            supervisor.kill()
            os._exit(EXIT_INTERRUPTED)
        asked.set()
        lines.stopping = True
        out.print("stopping: API, workers, Temporal", style="bold")
        if running is not None:
            running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    return asked


def _welcome(stack: DevStack, *, logs: Path) -> None:
    rows = [
        ("API", f"{stack.access.url}/api/v1"),
        ("docs", f"{stack.access.url}/docs"),
        ("Web UI", stack.access.web_ui_url),
        ("Temporal", stack.access.temporal_address),
        ("logs", str(logs)),
    ]
    if stack.new_key:
        rows.append(("API key", stack.access.api_key))
        rows.append(("callback secret", stack.callback_secret))
    out.print("Reelgate is ready", style="bold green")
    for name, value in rows:
        out.print(f"{name:>15}  ", style="dim", end="")
        out.print(value, markup=False)
    if stack.new_key:
        out.print("The key and the secret are shown this once; commands on this machine find the key by themselves.")
    out.print('Try: reelgate submit "a red circle moving right" --wait')


class LogLines:
    """Writes what the programs log: as it is to a file each, and for people to the terminal."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, TextIO] = {}
        self.stopping = False
        """Set at the end, when the server's parts miss each other."""
        self._render = console_renderer(colors=sys.stdout.isatty())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    def line(self, program: str, text: str) -> None:
        """Take one line of a program."""
        self._file(program).write(text + "\n")
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            event = {"level": "info", "event": text}
        if not self._of_interest(program, event):
            return
        shown = str(self._render(None, "", _for_people(event)))
        self._print(program, Text.from_ansi(shown))

    def event(self, program: str, text: str) -> None:
        """Take what the supervisor says about a program."""
        self._print(program, Text(text, style="bold red"))

    def _of_interest(self, program: str, event: dict[str, object]) -> bool:
        if program == "temporal":
            return event.get("level") in _SERIOUS and not self.stopping
        # One line per poll of a waiting client.
        return not (
            event.get("event") == "request" and event.get("method") == "GET" and event.get("status") in _ROUTINE
        )

    def _print(self, program: str, text: Text) -> None:
        out.print(Text(f"{program:>{_WIDTH}} | ", style=_COLOURS.get(program, "")) + text)

    def _file(self, program: str) -> TextIO:
        if program not in self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files[program] = (self._folder / f"{program}.log").open("a", encoding="utf-8", buffering=1)
        return self._files[program]


def _for_people(event: dict[str, object]) -> dict[str, object]:
    """Drop what the prefix says already; Temporal's own lines have other names for the same things."""
    shown = {
        name: value
        for name, value in event.items()
        if name not in {"process", "logger", "ts", "msg", "logging-call-at"}
    }
    if "event" not in shown and "msg" in event:
        shown["event"] = event["msg"]
    shown["timestamp"] = str(event.get("timestamp") or event.get("ts") or "")[11:19]
    return shown
