"""Session fixtures: one real Temporal server for all tests, with real time and with time skipping."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio
import structlog
from sse_starlette.sse import AppStatus
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from workers.devserver import ENVIRONMENT, server_args, temporal_binary
from workers.registry import keep_workflows_compiled


def pytest_sessionstart() -> None:
    os.environ.update({**ENVIRONMENT, **os.environ})
    keep_workflows_compiled()


LONG_FILES: Final = (
    "tests/durability/test_lost_processes.py",
    "tests/cli/test_dev.py",
    "tests/durability/",
    "tests/browser/",
    "tests/cli/test_demo.py",
    "tests/api/test_deployments.py",
    "tests/activities/",
    "tests/workflows/test_rollout.py",
    "tests/api/test_openapi.py",
    "tests/tools/",
)
"""They start many processes or generate clips; the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first, so that no process is left alone with them at the end."""

    def rank(item: pytest.Item) -> int:
        return next((rank for rank, name in enumerate(LONG_FILES) if item.nodeid.startswith(name)), len(LONG_FILES))

    items.sort(key=rank)


@pytest.fixture(autouse=True)
def _logs_stay_out_of_the_output_of_commands() -> None:
    """By default structlog prints to stdout; a test that resets it leaves the default behind."""
    if not structlog.is_configured():
        structlog.configure(logger_factory=structlog.stdlib.LoggerFactory())


@pytest.fixture(autouse=True)
def _streams_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that a test stops in this process tells all event streams of the process to end, later ones too."""
    monkeypatch.setattr(AppStatus, "should_exit", False)


@pytest_asyncio.fixture(scope="session")
async def temporal() -> AsyncIterator[WorkflowEnvironment]:
    """A real server, real time."""
    env = await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(),
        dev_server_extra_args=[*server_args(), "--sqlite-pragma", "journal_mode=WAL"],
        dev_server_log_level="error",
    )
    async with env:
        yield env


@pytest_asyncio.fixture(scope="session")
async def skipping() -> AsyncIterator[WorkflowEnvironment]:
    """A real server whose workflows skip time."""
    env = await WorkflowEnvironment.start_time_skipping_v2(
        dev_server_existing_path=temporal_binary(),
        dev_server_extra_args=[
            *server_args(),
            "--dynamic-config-value",
            "frontend.WorkflowTimeSkippingEnabled=true",
        ],
        dev_server_log_level="error",
    )
    async with env:
        yield env


@pytest.fixture
def client(temporal: WorkflowEnvironment) -> Client:
    """A client of the real-time server."""
    return temporal.client


@pytest.fixture
def skipping_client(skipping: WorkflowEnvironment) -> Client:
    """A client of the time-skipping server."""
    return skipping.client
