"""API processes as in production: `reelgate api`, each with its own port, over one data folder and one Temporal."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import httpx

from tests.api.stand import NO_TLS
from tests.cli.stack import clean_environment
from workers.devserver import free_port
from workers.settings import Settings

_START_SECONDS = 60.0


def environment_of(settings: Settings) -> dict[str, str]:
    """The environment variables that give a process these settings."""
    values = settings.model_dump(mode="json", include=settings.model_fields_set, exclude_none=True)
    return {f"REELGATE_{name.upper()}": _text(value) for name, value in values.items()}


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


class ApiProcess:
    """One of them. It can be killed and started again, on the same port."""

    def __init__(self, settings: Settings, log: Path) -> None:
        self.settings = settings.model_copy(update={"port": free_port()})
        self.url = f"http://127.0.0.1:{self.settings.port}"
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it; it takes a moment to answer."""
        environment = {**clean_environment(), **environment_of(self.settings), "REELGATE_LOG_LEVEL": "WARNING"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "api.cli", "api"], env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def until_ready(self) -> None:
        """Return when it answers."""
        assert self._process is not None
        give_up_at = time.monotonic() + _START_SECONDS
        while not self.answers():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < give_up_at, self._log.read_text()
            time.sleep(0.05)

    def answers(self) -> bool:
        """Whether it serves."""
        try:
            return httpx.get(f"{self.url}/healthz", timeout=1, verify=NO_TLS).is_success
        except httpx.HTTPError:
            return False

    def stop(self) -> int:
        """SIGTERM, and wait for the end; the exit code."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(60)
        self._process = None
        return code

    def kill(self) -> None:
        """SIGKILL: nothing is finished."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
