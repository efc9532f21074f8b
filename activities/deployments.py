"""Worker Deployments as Temporal keeps them: which version of a pool's workers gets new tasks.

A version is a build id. One is the current, one may be ramping with a share of the tasks. Which of the two gets a
task is decided by a hash of its workflow id, so its retries stay with the version it began with. A change can be
made against what was read before (the token), so that two who change at once cannot overwrite each other unseen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeVar

from temporalio.api.deployment.v1 import WorkerDeploymentVersion
from temporalio.api.enums.v1 import RoutingConfigUpdateState, TaskQueueType, VersionDrainageStatus
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    DeleteWorkerDeploymentVersionRequest,
    DescribeTaskQueueRequest,
    DescribeWorkerDeploymentRequest,
    DescribeWorkerDeploymentResponse,
    DescribeWorkerDeploymentVersionRequest,
    SetWorkerDeploymentCurrentVersionRequest,
    SetWorkerDeploymentRampingVersionRequest,
)
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from workflows.naming import deployment_name

UNVERSIONED: Final = ""
"""Build id that stands for workers outside of any deployment."""

_PAUSE_SECONDS: Final = 0.2
# The server bounds the requests to one deployment, and says so with the second.
_PASSING: Final = frozenset({RPCStatusCode.UNAVAILABLE, RPCStatusCode.RESOURCE_EXHAUSTED})
_REFUSALS: Final = frozenset({RPCStatusCode.FAILED_PRECONDITION, RPCStatusCode.INVALID_ARGUMENT})

_Answer = TypeVar("_Answer")


class DeploymentError(Exception):
    """A deployment cannot be read or changed; the message says why."""


class DeploymentNotFoundError(DeploymentError):
    """There is no such deployment, or no such version in it."""


class DeploymentRefusedError(DeploymentError):
    """The server refused the change, or it was changed by somebody else since it was read."""


class DeploymentSilentError(DeploymentError):
    """The server did not answer in time."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Who gets new tasks."""

    current: str
    """Build id; `UNVERSIONED`: workers outside of the deployment."""
    ramping: str | None = None
    percentage: float = 0.0
    """Share of the ramping version."""
    drainage: Mapping[str, str] = field(default_factory=dict)
    """Every version by its build id, the newest first: `draining`, `drained`, or empty where that means nothing."""
    token: bytes = b""


class WorkerDeployment:
    """The deployment of the workers of one task queue.

    Args:
        client: of the namespace.
        task_queue: `control`, `callback` or `gpu-<pool>`.
        call_limit: time for one call. A change is a workflow of the server's own and can take over a second.
    """

    def __init__(self, client: Client, task_queue: str, *, call_limit: timedelta = timedelta(seconds=10)) -> None:
        self._client = client
        self._queue = task_queue
        self._limit = call_limit
        self.name = deployment_name(task_queue)

    async def routing(self) -> Routing:
        """Who gets new tasks, and which versions there are.

        Raises:
            DeploymentError: no worker ever polled as a version of it, or no answer.
        """
        reply = await self._described()
        config = reply.worker_deployment_info.routing_config
        ramps = config.HasField("ramping_deployment_version")
        summaries = sorted(
            reply.worker_deployment_info.version_summaries, key=lambda v: v.create_time.ToNanoseconds(), reverse=True
        )
        return Routing(
            current=config.current_deployment_version.build_id,
            ramping=config.ramping_deployment_version.build_id if ramps else None,
            percentage=config.ramping_version_percentage if ramps else 0.0,
            drainage={v.deployment_version.build_id: _drainage(v.drainage_info.status) for v in summaries},
            token=reply.conflict_token,
        )

    async def set_current(self, build_id: str, *, token: bytes = b"") -> None:
        """Send all new tasks to a version. A ramp to the same version ends with that.

        Raises:
            DeploymentError: no such version, refused, or no answer.
        """
        request = SetWorkerDeploymentCurrentVersionRequest(
            namespace=self._client.namespace,
            deployment_name=self.name,
            build_id=build_id,
            conflict_token=token,
            identity=self._client.identity,
        )
        await self._call(lambda: self._client.workflow_service.set_worker_deployment_current_version(request))
        await self._until_spread()

    async def set_ramp(self, build_id: str | None, percentage: float, *, token: bytes = b"") -> None:
        """Send a share of the new tasks to a version; None ends the ramp. What waits is sent anew.

        Raises:
            DeploymentError: no such version, refused (e.g. the current one), or no answer.
        """
        request = SetWorkerDeploymentRampingVersionRequest(
            namespace=self._client.namespace,
            deployment_name=self.name,
            build_id=build_id or "",
            percentage=percentage if build_id else 0.0,
            conflict_token=token,
            identity=self._client.identity,
        )
        await self._call(lambda: self._client.workflow_service.set_worker_deployment_ramping_version(request))
        await self._until_spread()

    async def pollers(self) -> dict[str, list[str]]:
        """Identities of workers that have asked for work in the last minutes, by build id; `UNVERSIONED` for others.

        Raises:
            DeploymentError: no answer.
        """
        request = DescribeTaskQueueRequest(
            namespace=self._client.namespace,
            task_queue=TaskQueue(name=self._queue),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
            report_pollers=True,
        )
        reply = await self._call(lambda: self._client.workflow_service.describe_task_queue(request))
        found: dict[str, list[str]] = {}
        for poller in reply.pollers:
            ours = poller.deployment_options.deployment_name == self.name
            found.setdefault(poller.deployment_options.build_id if ours else UNVERSIONED, []).append(poller.identity)
        return found

    async def backlog(self, build_id: str) -> int:
        """Tasks that wait for a version, about. The server splits what waits between current and ramping version.

        Raises:
            DeploymentError: no such version, or no answer.
        """
        request = DescribeWorkerDeploymentVersionRequest(
            namespace=self._client.namespace, deployment_version=self._version(build_id), report_task_queue_stats=True
        )
        reply = await self._call(lambda: self._client.workflow_service.describe_worker_deployment_version(request))
        return sum(queue.stats.approximate_backlog_count for queue in reply.version_task_queues)

    async def delete(self, build_id: str) -> None:
        """Forget a version.

        Raises:
            DeploymentError: no such version, the server says that it is in use, or no answer.
        """
        request = DeleteWorkerDeploymentVersionRequest(
            namespace=self._client.namespace,
            deployment_version=self._version(build_id),
            identity=self._client.identity,
        )
        await self._call(lambda: self._client.workflow_service.delete_worker_deployment_version(request))

    async def _described(self) -> DescribeWorkerDeploymentResponse:
        request = DescribeWorkerDeploymentRequest(namespace=self._client.namespace, deployment_name=self.name)
        return await self._call(lambda: self._client.workflow_service.describe_worker_deployment(request))

    async def _until_spread(self) -> None:
        """Wait, for a while, until the task queues know of a change. It is made already, and spreads by itself."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._limit.total_seconds()
        while loop.time() < give_up_at:
            state = (await self._described()).worker_deployment_info.routing_config_update_state
            if state != RoutingConfigUpdateState.ROUTING_CONFIG_UPDATE_STATE_IN_PROGRESS:
                return
            await asyncio.sleep(_PAUSE_SECONDS)

    def _version(self, build_id: str) -> WorkerDeploymentVersion:
        return WorkerDeploymentVersion(deployment_name=self.name, build_id=build_id)

    async def _call(self, call: Callable[[], Awaitable[_Answer]]) -> _Answer:
        try:
            async with asyncio.timeout(self._limit.total_seconds()):
                while True:
                    try:
                        return await call()
                    except RPCError as error:
                        if error.status is RPCStatusCode.NOT_FOUND:
                            raise DeploymentNotFoundError(error.message) from None
                        if error.status in _REFUSALS:
                            raise DeploymentRefusedError(error.message) from None
                        if error.status not in _PASSING:
                            raise DeploymentError(f"{self.name}: {error.status.name}: {error.message}") from None
                    await asyncio.sleep(_PAUSE_SECONDS)
        except TimeoutError:
            seconds = self._limit.total_seconds()
            raise DeploymentSilentError(f"{self.name}: Temporal did not answer within {seconds:g} s") from None


def _drainage(status: VersionDrainageStatus.ValueType) -> str:
    match status:
        case VersionDrainageStatus.VERSION_DRAINAGE_STATUS_DRAINING:
            return "draining"
        case VersionDrainageStatus.VERSION_DRAINAGE_STATUS_DRAINED:
            return "drained"
        case _:
            return ""
