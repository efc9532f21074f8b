"""What the benchmarks run on: the embedded server with the product's settings, and each worker a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import structlog
from prometheus_client.parser import text_string_to_metric_families
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from tests.api.api_processes import ApiProcess, environment_of
from tests.api.stand import api_settings, create_keys
from tests.cli.stack import REELGATE, clean_environment
from workers.connection import connect
from workers.devserver import ENVIRONMENT, SQLITE_PRAGMAS, free_port, server_args, temporal_binary
from workers.settings import Settings

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

OPEN_LIMITS: Mapping[str, object] = {
    "max_pending_tasks": 100_000,
    "submit_rate_per_minute": 600_000.0,
    "submit_burst": 100_000,
    "max_backlog": 100_000,
    "queue_timeout_seconds": 3_600.0,
    "deadline_seconds": 7_200.0,
}
"""Limits that are on and never reached."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A running server and the processes started on it so far; all end with the benchmark."""

    folder: Path
    settings: Settings
    keys: Mapping[str, str]
    client: Client
    metrics_url: str
    _processes: ExitStack

    def worker(self, kind: str, *, floor: bool = False) -> int:
        """Start a worker of the product, or one of `tests.benchmarks.floor_workers`; returns its process id."""
        program = [sys.executable, "-m", "tests.benchmarks.floor_workers"] if floor else [*REELGATE, "worker"]
        environment = {**clean_environment(), **environment_of(self.settings), "REELGATE_LOG_LEVEL": "ERROR"}
        with (self.folder / f"{kind}.log").open("ab") as log:
            running = subprocess.Popen([*program, kind], env=environment, stdout=log, stderr=subprocess.STDOUT)
        self._processes.callback(running.wait)
        self._processes.callback(running.kill)
        return running.pid

    def api(self) -> ApiProcess:
        """Start an API process; it takes a moment to answer."""
        return self._processes.enter_context(ApiProcess(self.settings, self.folder / "api.log"))

    async def server_counter(self, name: str) -> float:
        """Sum of a counter of the Temporal server over all its labels."""
        async with httpx.AsyncClient() as http:
            text = (await http.get(self.metrics_url)).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if family.name == name
        )


@dataclass(frozen=True, kw_only=True)
class Server:
    """A Temporal server of one benchmark, and a folder that goes with it."""

    folder: Path
    address: str
    metrics_url: str


@asynccontextmanager
async def bench_server(*, in_memory: bool = False) -> AsyncIterator[Server]:
    """Start it, with its state in a file as the product has it, or in memory where no figure depends on that."""
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    os.environ.update({**ENVIRONMENT, **os.environ})
    metrics_port = free_port()
    with tempfile.TemporaryDirectory(prefix="reelgate-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        pragmas = [part for pragma in SQLITE_PRAGMAS for part in ("--sqlite-pragma", pragma)]
        env = await WorkflowEnvironment.start_local(
            dev_server_existing_path=temporal_binary(),
            dev_server_database_filename=None if in_memory else str(folder / "temporal.db"),
            dev_server_extra_args=[
                *server_args(),
                *([] if in_memory else pragmas),
                *("--metrics-port", str(metrics_port)),
            ],
            dev_server_log_level="error",
        )
        async with env:
            yield Server(
                folder=folder,
                address=env.client.service_client.config.target_host,
                metrics_url=f"http://127.0.0.1:{metrics_port}/metrics",
            )


@asynccontextmanager
async def bench_site(**changes: object) -> AsyncIterator[Site]:
    """Start the server and make the settings; workers are started by the benchmark."""
    async with bench_server() as server:
        settings = api_settings(server.folder, server.address, 1, **{**OPEN_LIMITS, **changes})
        with ExitStack() as processes:
            yield Site(
                folder=server.folder,
                settings=settings,
                keys=create_keys(settings),
                client=await connect(settings, register_search_attributes=True),
                metrics_url=server.metrics_url,
                _processes=processes,
            )


async def call_all(call: Callable[[int], Awaitable[object]], count: int, *, at_once: int) -> None:
    """Make calls 0 to `count` - 1, so many at a time."""
    numbers = iter(range(count))

    async def caller() -> None:
        for number in numbers:
            await call(number)

    await asyncio.gather(*(caller() for _ in range(at_once)))


def resident_mb(process_id: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * _PAGE_BYTES / 1e6


def median(values: Iterable[float]) -> float:
    """The median, to four digits."""
    return rounded(statistics.median(values))


def rounded(value: float) -> float:
    """A figure without the digits that mean nothing."""
    return float(f"{value:.4g}")


def report(bench: str, figures: Mapping[str, float]) -> None:
    """Print a table and, as the last line, the same as JSON."""
    for name, value in figures.items():
        print(f"{name:>44}  {value:g}")  # noqa: T201 - this is what the program is for
    print(json.dumps({"bench": bench, **figures}))  # noqa: T201
