"""A gateway with painting workers, and a browser in front of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
import pytest_asyncio
from temporalio.worker import Worker

from activities.artifacts import ArtifactRepository
from tests.api.conftest import running_stand
from tests.api.stand import PlayedDelivery, Stand
from tests.browser.chromium import Browser, Page, chromium, chromium_path
from tests.browser.painting import PaintedGeneration
from tests.workflows.jobs import callback_worker
from workflows import naming


@pytest_asyncio.fixture(scope="session")
async def gallery(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """A gateway whose GPU worker paints."""
    folder = tmp_path_factory.mktemp("browser")
    async with running_stand(folder) as stand, stand.control_worker():
        artifacts = ArtifactRepository(stand.store, retention=stand.settings.retention)
        painter = PaintedGeneration(stand.client, artifacts, folder / "frames")
        generation = Worker(
            stand.client,
            task_queue=naming.gpu_queue("default"),
            activities=[painter.generate_clip],
            max_concurrent_activities=2,
            max_heartbeat_throttle_interval=timedelta(seconds=0.2),
        )
        # As long as a real one, without a place to break it.
        played = PlayedDelivery(json.dumps({"type": "task.succeeded", "result_url": f"http://127.0.0.1/{'v' * 400}"}))
        delivery = callback_worker(stand.client, played)
        async with generation, delivery:
            yield stand


@pytest_asyncio.fixture(scope="session")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    """A browser with an empty profile."""
    if chromium_path() is None:
        pytest.skip("no Chromium on this machine")
    async with chromium(tmp_path_factory.mktemp("chromium") / "profile") as running:
        yield running


@pytest_asyncio.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    """An empty tab of a person who was never here."""
    async with browser.tab() as tab:
        await tab.screen(width=1280, height=900)
        yield tab
