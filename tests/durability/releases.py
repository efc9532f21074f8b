"""Versioned workers of a site, and `reelgate deploy` as an operator runs it."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from activities.deployments import DeploymentNotFoundError, WorkerDeployment
from api.deployments import Releases
from tests.cli.stack import reelgate
from tests.durability.site import Process, Site

HEARTBEAT = timedelta(seconds=1)


def start_version(site: Site, name: str, build_id: str, **environment: str) -> Process:
    """Start a worker of a version."""
    return site.start(
        name,
        REELGATE_WORKER_VERSIONING="true",
        REELGATE_BUILD_ID=build_id,
        REELGATE_WORKER_HEARTBEAT_SECONDS="1",
        **environment,
    )


async def until_known(site: Site, task_queue: str, *build_ids: str) -> None:
    """Wait until workers of these versions have polled."""
    deployment = WorkerDeployment(await site.client(), task_queue)
    async with asyncio.timeout(90):
        while True:
            try:
                if set(build_ids) <= set((await deployment.routing()).drainage) & set(await deployment.pollers()):
                    return
            except DeploymentNotFoundError:
                pass
            await asyncio.sleep(0.25)


async def releases(site: Site) -> Releases:
    """What `reelgate deploy` asks and tells the server."""
    return Releases(await site.client(), heartbeat=HEARTBEAT)


async def deploy(site: Site, *arguments: str, code: int = 0) -> str:
    """Run `reelgate deploy ...`; what it wrote."""
    done = await asyncio.to_thread(
        reelgate,
        "deploy",
        *arguments,
        environment=site.environment(REELGATE_WORKER_HEARTBEAT_SECONDS="1", COLUMNS="200"),
    )
    assert done.returncode == code, done
    return done.stdout + done.stderr
