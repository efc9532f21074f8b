"""Releases as an operator sees and changes them: versions of the workers of a pool, what they hold, what they get."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from temporalio.api.worker.v1 import WorkerHeartbeat
from temporalio.api.workflowservice.v1 import ListWorkerDeploymentsRequest
from temporalio.client import Client

from activities.deployments import (
    UNVERSIONED,
    DeploymentNotFoundError,
    DeploymentRefusedError,
    Routing,
    WorkerDeployment,
)
from api.heartbeats import has_ended, heartbeat_pages, is_silent
from api.temporal_calls import bounded
from workflows.naming import CALLBACK_QUEUE, CONTROL_QUEUE, deployment_name, gpu_queue

CALL_LIMIT: Final = timedelta(seconds=10)
_PAGE: Final = 500
_PREFIX: Final = deployment_name("")


@dataclass(frozen=True, kw_only=True)
class VersionState:
    """One version of a deployment."""

    build_id: str
    """`UNVERSIONED`: workers outside of the deployment."""
    role: str
    """`current`, `ramping`, `draining`, `drained` or `idle`."""
    percentage: float
    """Share of new tasks."""
    workers: int
    """That run, those that drain included."""
    pollers: int
    """Workers that asked for work in the last minutes."""
    in_work: int
    """Activities that its workers run now."""
    waiting: int
    """Tasks that wait for it, about."""


@dataclass(frozen=True, kw_only=True)
class DeploymentState:
    """The deployment of one task queue."""

    name: str
    task_queue: str
    versions: tuple[VersionState, ...]
    """The newest first; workers outside of the deployment last."""


def queue_of(name: str) -> str:
    """Task queue of a deployment: `control`, `callback` or `gpu-<pool>`, with or without the prefix `reelgate-`.

    Raises:
        ValueError: it is none of them.
    """
    queue = name.removeprefix(_PREFIX)
    if queue not in {CONTROL_QUEUE, CALLBACK_QUEUE} and not (
        queue.startswith(gpu_queue("")) and queue != gpu_queue("")
    ):
        raise ValueError(f"{name!r} is no deployment: give control, callback or gpu-POOL")
    return queue


class Releases:
    """The deployments of a namespace.

    Args:
        client: of the namespace.
        heartbeat: how often workers report; one that missed several is gone.
    """

    def __init__(self, client: Client, *, heartbeat: timedelta) -> None:
        self._client = client
        self._heartbeat = heartbeat

    async def task_queues(self) -> list[str]:
        """Task queues whose workers have a deployment, sorted.

        Raises:
            TemporalUnavailableError: no answer in time.
        """
        found: list[str] = []
        token = b""
        while True:
            request = ListWorkerDeploymentsRequest(
                namespace=self._client.namespace, page_size=_PAGE, next_page_token=token
            )
            reply = await bounded(
                lambda asked=request: self._client.workflow_service.list_worker_deployments(asked),  # type: ignore[misc]
                limit=CALL_LIMIT,
            )
            found += [d.name.removeprefix(_PREFIX) for d in reply.worker_deployments if d.name.startswith(_PREFIX)]
            token = reply.next_page_token
            if not token:
                return sorted(found)

    async def state(self, task_queue: str) -> DeploymentState:
        """One deployment with every version.

        Raises:
            DeploymentError: there is none, or no answer in time.
            TemporalUnavailableError: no answer in time.
        """
        deployment = self._deployment(task_queue)
        routing, pollers, beats = await asyncio.gather(
            deployment.routing(), deployment.pollers(), self._beats(task_queue)
        )
        waiting = await asyncio.gather(*(deployment.backlog(build_id) for build_id in routing.drainage))
        versions = [
            _version(build_id, routing, beats.get(build_id, ()), pollers.get(build_id, ()), waits)
            for build_id, waits in zip(routing.drainage, waiting, strict=True)
        ]
        outside = _version(UNVERSIONED, routing, beats.get(UNVERSIONED, ()), pollers.get(UNVERSIONED, ()), 0)
        if outside.workers or outside.pollers or outside.role == "current":
            versions.append(outside)
        return DeploymentState(name=deployment.name, task_queue=task_queue, versions=tuple(versions))

    async def make_current(self, task_queue: str, build_id: str, *, without_workers: bool = False) -> None:
        """Send all new tasks to a version.

        Raises:
            DeploymentRefusedError: none of its workers asks for work, or the server refused.
            DeploymentError: no such version, or no answer in time.
        """
        deployment = self._deployment(task_queue)
        routing = await self._routing_with(deployment, build_id)
        if not without_workers:
            await self._require_workers(deployment, build_id)
        await deployment.set_current(build_id, token=routing.token)

    async def ramp(self, task_queue: str, build_id: str, percentage: float, *, without_workers: bool = False) -> None:
        """Send a share of the new tasks to a version; 0 ends its ramp.

        Raises:
            DeploymentRefusedError: none of its workers asks for work, it is the current version, or the server refused.
            DeploymentError: no such version, or no answer in time.
        """
        deployment = self._deployment(task_queue)
        routing = await self._routing_with(deployment, build_id)
        if routing.current == build_id:
            raise DeploymentRefusedError(f"{build_id} is the current version of {deployment.name} already")
        if percentage == 0:
            if routing.ramping != build_id:
                raise DeploymentRefusedError(f"{build_id} is not ramping in {deployment.name}")
            await deployment.set_ramp(None, 0.0, token=routing.token)
            return
        if not without_workers:
            await self._require_workers(deployment, build_id)
        await deployment.set_ramp(build_id, percentage, token=routing.token)

    async def retire(self, task_queue: str, build_id: str) -> None:
        """Forget a version that holds no work.

        Raises:
            DeploymentRefusedError: it holds work; the message says which.
            DeploymentError: no such version, or no answer in time.
        """
        deployment = self._deployment(task_queue)
        state = await self.state(task_queue)
        version = next((v for v in state.versions if v.build_id == build_id and build_id != UNVERSIONED), None)
        if version is None:
            raise _unknown(deployment, build_id, [v.build_id for v in state.versions if v.build_id != UNVERSIONED])
        if holds := _holds(version):
            raise DeploymentRefusedError(f"{build_id} of {deployment.name} {'; it '.join(holds)}")
        await deployment.delete(build_id)

    def _deployment(self, task_queue: str) -> WorkerDeployment:
        return WorkerDeployment(self._client, task_queue, call_limit=CALL_LIMIT)

    async def _routing_with(self, deployment: WorkerDeployment, build_id: str) -> Routing:
        try:
            routing = await deployment.routing()
        except DeploymentNotFoundError:
            raise DeploymentNotFoundError(
                f"there is no {deployment.name}: no worker has polled with REELGATE_WORKER_VERSIONING=true"
            ) from None
        if build_id not in {*routing.drainage, UNVERSIONED}:
            raise _unknown(deployment, build_id, list(routing.drainage))
        return routing

    async def _require_workers(self, deployment: WorkerDeployment, build_id: str) -> None:
        if not (await deployment.pollers()).get(build_id):
            raise DeploymentRefusedError(
                f"no worker of {build_id or 'unversioned'} asks for work of {deployment.name}: what it got would wait"
            )

    async def _beats(self, task_queue: str) -> dict[str, list[WorkerHeartbeat]]:
        """Workers that run, by build id."""
        found: dict[str, list[WorkerHeartbeat]] = {}
        async for page in heartbeat_pages(self._client, call_limit=CALL_LIMIT, task_queue=task_queue):
            for beat in page:
                if not has_ended(beat) and not is_silent(beat, self._heartbeat):
                    found.setdefault(beat.deployment_version.build_id, []).append(beat)
        return found


def _version(
    build_id: str, routing: Routing, beats: Sequence[WorkerHeartbeat], pollers: Sequence[str], waiting: int
) -> VersionState:
    if build_id == routing.current:
        role, share = "current", 100.0 - routing.percentage
    elif build_id == routing.ramping:
        role, share = "ramping", routing.percentage
    else:
        role, share = routing.drainage.get(build_id) or "idle", 0.0
    return VersionState(
        build_id=build_id,
        role=role,
        percentage=share,
        workers=len(beats),
        pollers=len(pollers),
        in_work=sum(beat.activity_task_slots_info.current_used_slots for beat in beats),
        waiting=waiting,
    )


def _holds(version: VersionState) -> list[str]:
    """What keeps a version from being retired, in words."""
    reasons = []
    if version.role in {"current", "ramping"}:
        reasons.append(f"gets {version.percentage:g} % of new tasks: make another version the current one first")
    if version.in_work:
        reasons.append(f"runs {_count(version.in_work, 'task')}")
    if version.waiting and version.role not in {"current", "ramping"}:
        reasons.append(f"has {_count(version.waiting, 'task')} waiting")
    if version.workers or version.pollers:
        workers = _count(max(version.workers, version.pollers), "worker")
        reasons.append(f"has {workers} running, or seen a moment ago: stop them")
    if version.role == "draining":
        reasons.append("is draining: Temporal looks every few minutes whether a run still needs it")
    return reasons


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _unknown(deployment: WorkerDeployment, build_id: str, known: Sequence[str]) -> DeploymentNotFoundError:
    has = f"it has {', '.join(known)}" if known else "it has none"
    return DeploymentNotFoundError(f"{deployment.name} has no version {build_id}; {has}")
