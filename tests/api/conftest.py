"""Two gateways for all API tests: one whose workers all run, one that has none unless a test starts some.

Each has a Temporal server of its own, because its queues are the product's real ones.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import structlog
from temporalio.testing import WorkflowEnvironment

from api.admission import Admission, OpenAdmission
from tests.api.stand import PlayedGeneration, Stand, api_settings, create_keys, listening, open_stand, serving
from workers.connection import connect
from workers.devserver import server_args, temporal_binary


@pytest.fixture(scope="session", autouse=True)
def _plain_logs() -> Iterator[None]:
    """As in production, tracebacks without local variables: drawing those takes half a minute."""
    structlog.configure(
        processors=[
            structlog.stdlib.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(),
        ],
        # Not on stdout, which tests of commands read.
        logger_factory=structlog.PrintLoggerFactory(sys.__stderr__),
    )
    yield
    structlog.reset_defaults()


@asynccontextmanager
async def running_stand(folder: Path, *, admission: Admission | None = None, **changes: object) -> AsyncIterator[Stand]:
    """A running gateway without workers; `changes` are settings."""
    env = await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(),
        dev_server_extra_args=server_args(),
        dev_server_log_level="error",
    )
    async with env:
        with listening() as sock:
            port = sock.getsockname()[1]
            settings = api_settings(folder, env.client.service_client.config.target_host, port, **changes)
            keys = create_keys(settings)
            client = await connect(settings, register_search_attributes=True)
            with serving(settings, sock, admission=admission) as url:
                yield open_stand(folder, url, settings, client, keys)


@pytest_asyncio.fixture(scope="session")
async def quiet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """A gateway without workers. It admits everyone: the real admission needs a control worker."""
    async with running_stand(tmp_path_factory.mktemp("quiet"), admission=OpenAdmission()) as stand:
        yield stand


@pytest_asyncio.fixture(scope="session")
async def _busy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Stand, PlayedGeneration]]:
    async with running_stand(tmp_path_factory.mktemp("busy")) as stand, stand.workers() as played:
        yield stand, played


@pytest.fixture
def stand(_busy: tuple[Stand, PlayedGeneration]) -> Stand:
    """A gateway whose workers all run."""
    return _busy[0]


@pytest.fixture
def played(_busy: tuple[Stand, PlayedGeneration]) -> PlayedGeneration:
    """The generation of that gateway."""
    return _busy[1]


@pytest_asyncio.fixture
async def http(stand: Stand) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a user with no tasks."""
    async with stand.user() as client:
        yield client


@pytest_asyncio.fixture
async def stranger(stand: Stand) -> AsyncIterator[httpx.AsyncClient]:
    """A client of another user."""
    async with stand.user() as client:
        yield client


@pytest_asyncio.fixture
async def waiting(quiet: Stand) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a user with no tasks, where no worker runs."""
    async with quiet.user() as client:
        yield client
