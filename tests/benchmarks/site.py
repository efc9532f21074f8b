"""What the benchmarks run on: the embedded server with the product's settings, and each worker a process of its own."""

from __future__ import annotations

import json
import logging
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
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
from workers.devserver import SQLITE_PRAGMAS, dynamic_config_args, free_port, temporal_binary
from workers.settings import Settings

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


@asynccontextmanager
async def bench_site(**changes: object) -> AsyncIterator[Site]:
    """Start the server and make the settings; workers are started by the benchmark."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    metrics_port = free_port()
    with tempfile.TemporaryDirectory(prefix="reelgate-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        env = await WorkflowEnvironment.start_local(
            dev_server_existing_path=temporal_binary(),
            dev_server_database_filename=str(folder / "temporal.db"),
            dev_server_extra_args=[
                *dynamic_config_args(),
                *(part for pragma in SQLITE_PRAGMAS for part in ("--sqlite-pragma", pragma)),
                *("--metrics-port", str(metrics_port)),
            ],
            dev_server_log_level="error",
        )
        async with env:
            address = env.client.service_client.config.target_host
            settings = api_settings(folder, address, 1, **{**OPEN_LIMITS, **changes})
            with ExitStack() as processes:
                yield Site(
                    folder=folder,
                    settings=settings,
                    keys=create_keys(settings),
                    client=await connect(settings, register_search_attributes=True),
                    metrics_url=f"http://127.0.0.1:{metrics_port}/metrics",
                    _processes=processes,
                )


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
