"""`reelgate` as a person runs it: `dev` as a process with a data folder of its own, and commands against it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from api.cli import main
from api.cli_client import Access, Gateway
from api.schemas import Task

REELGATE = (sys.executable, "-P", "-m", "api.cli")
START_SECONDS = 120.0


def clean_environment(**changes: str) -> dict[str, str]:
    """Our environment without settings that the developer has."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("REELGATE_", "TEMPORAL_"))}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


def reelgate(
    *arguments: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [*REELGATE, *arguments],
        env=dict(environment or clean_environment()),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def reelgate_here(
    *arguments: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The same in this process, for commands that ask and end: most of what a process of their own costs is imports.

    Not for those that end the process themselves: `doctor`, `replay`, `deploy`, `rollout`.
    """
    out, err, code = StringIO(), StringIO(), 0
    with (
        patch.dict(os.environ, environment or clean_environment(), clear=True),
        patch.object(sys, "argv", ["reelgate", *arguments]),
        chdir(cwd or Path.cwd()),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(["reelgate", *arguments], code, out.getvalue(), err.getvalue())


def processes_of(folder: Path) -> list[str]:
    """Command lines of the living processes that work for a data folder."""
    mark = f"REELGATE_DATA_DIR={folder}".encode()
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Wait for something another process does."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


class Dev:
    """One `reelgate dev`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "data"
        self.environment = clean_environment(REELGATE_DATA_DIR=str(self.folder))
        self._home = folder
        self._output = folder / "dev.out"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it says that it is ready."""
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*REELGATE, "dev", "--port", "0", "--temporal-port", "0", "--ui-port", "0"],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until(self._ready, seconds=START_SECONDS, what="dev is ready")

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.output
        return "Try: reelgate submit" in self.output

    @property
    def output(self) -> str:
        """What it wrote since its last start."""
        return self._output.read_text()

    @property
    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal; the exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(90)

    def kill(self) -> None:
        """Clean up after a failed test."""
        if self.runs:
            self.stop(signal.SIGTERM)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command against it."""
        return reelgate(*arguments, environment=self.environment, cwd=self._home)

    def run_here(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command against it in this process."""
        return reelgate_here(*arguments, environment=self.environment, cwd=self._home)

    def json(self, *arguments: str) -> dict[str, object]:
        """Run a command with --json that succeeds; its document."""
        done = self.run_here(*arguments, "--json")
        assert done.returncode == 0, done
        document = json.loads(done.stdout)
        assert isinstance(document, dict)
        return document

    def open(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command against it; both its outputs are one."""
        return subprocess.Popen(
            [*REELGATE, *arguments],
            env=self.environment,
            cwd=self._home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def task(self, task_id: str) -> Task:
        """Read a task without the cost of a command."""
        with Gateway(Access.find(self.environment)) as gateway:
            return gateway.read(task_id).task

    def pid_of(self, program: str) -> int | None:
        """Process id of a worker; None while there is none."""
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    command = (process / "cmdline").read_bytes().split(b"\0")
                    ours = f"REELGATE_DATA_DIR={self.folder}".encode() in (process / "environ").read_bytes().split(
                        b"\0"
                    )
                except OSError:
                    continue
                if ours and command[-3:-1] == [b"worker", program.encode()]:
                    return int(process.name)
        return None
