"""Checks of the Temporal server and of what works for it; they need no payload keys and no worker."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, timedelta
from typing import Final

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.namespace.v1 import NamespaceInfo
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    DescribeNamespaceRequest,
    DescribeTaskQueueRequest,
    GetClusterInfoRequest,
    ListTaskQueuePartitionsRequest,
    ListWorkersRequest,
    PollWorkflowTaskQueueRequest,
)
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from api.doctor.findings import Check, Finding, broken, look, ok, within
from api.heartbeats import PAGE, is_live, silence_of
from workers.codec import KEY_ID_FIELD, CodecKeyError, codec_from
from workers.connection import check_search_attributes, connect_bare
from workers.errors import ConfigurationError
from workers.registry import catalogue
from workers.settings import Settings
from workflows import naming

OLDEST_SERVER: Final = (1, 31)
"""The first that has priority by default; 1.32 is what the tests run against."""
MAX_SKEW_SECONDS: Final = 2.0
_LIMIT: Final = timedelta(seconds=5)
_CONNECT_LIMIT: Final = timedelta(seconds=4)
_CLOCK_QUEUE: Final = "reelgate-doctor"
"""Nothing is ever put there: whoever polls it is told the server's time through the queue's list of pollers."""
_NEWEST: Final = 50
_DYNAMIC_CONFIG: Final = "deploy/temporal/dynamicconfig.yaml"
_UNREACHABLE: Final = (
    "see that the server runs (temporal operator cluster health) and that its port is open from here; nothing is lost: "
    "tasks go on when it is back"
)


async def temporal(settings: Settings) -> Sequence[Finding]:
    """Everything about the server; one line when it cannot be reached."""
    try:
        client = await connect_bare(settings, timeout=_CONNECT_LIMIT)
        cluster = await client.workflow_service.get_cluster_info(GetClusterInfoRequest(), timeout=_CONNECT_LIMIT)
    except (ConfigurationError, RPCError) as error:
        return [broken("temporal", " ".join(str(error).split()), _UNREACHABLE)]
    detail = (
        f"{settings.temporal_address}: server {cluster.server_version}, {cluster.persistence_store}, "
        f"{cluster.history_shard_count} history shards"
    )
    old = tuple(int(part) for part in re.findall(r"\d+", cluster.server_version)[:2]) < OLDEST_SERVER
    wanted = ".".join(map(str, OLDEST_SERVER))
    first = (
        broken("temporal", detail, f"upgrade to {wanted} or later, one minor version at a time")
        if old
        else ok("temporal", detail)
    )
    return [first, *await _of_namespace(client, settings)]


async def _of_namespace(client: Client, settings: Settings) -> list[Finding]:
    try:
        described = await client.workflow_service.describe_namespace(
            DescribeNamespaceRequest(namespace=settings.namespace), timeout=_CONNECT_LIMIT
        )
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            return [broken("namespace", error.message, _UNREACHABLE)]
        days = settings.retention_days
        create = f"temporal operator namespace create --namespace {settings.namespace} --retention {days}d"
        return [broken("namespace", f"there is no namespace {settings.namespace!r}", create)]
    kept = described.config.workflow_execution_retention_ttl.ToTimedelta()
    checks: dict[str, Check] = {
        "search attributes": lambda: _search_attributes(client),
        "partitions": lambda: _partitions(client, settings),
        "payloads": lambda: _payloads(client, settings),
        "workers": lambda: _workers(client, settings),
        "clock": lambda: clock(client),
    }
    found = await asyncio.gather(
        *(
            within(_LIMIT, name, check, remedy="run this again; then look at the server's log")
            for name, check in checks.items()
        )
    )
    return [
        _retention(settings, kept),
        *_capabilities(described.namespace_info.capabilities),
        *(finding for findings in found for finding in findings),
    ]


def _retention(settings: Settings, kept: timedelta) -> Finding:
    detail = f"namespace {settings.namespace} keeps closed runs {kept / timedelta(days=1):g} days"
    if kept == settings.retention:
        return ok("retention", detail)
    why = "records and idempotency keys go before their clips" if kept < settings.retention else "records outlive clips"
    command = (
        f"temporal operator namespace update --namespace {settings.namespace} --retention {settings.retention_days}d"
    )
    return broken("retention", f"{detail}, clips are kept {settings.retention_days}: {why}", command)


def _capabilities(capabilities: NamespaceInfo.Capabilities) -> list[Finding]:
    """What dynamic configuration shows of itself; the rest has to be read in the file."""
    found = []
    for has, key, lost in (
        (capabilities.worker_heartbeats, "frontend.WorkerHeartbeatsEnabled", "fleet views and /models stay empty"),
        (capabilities.worker_commands, "frontend.WorkerCommandsEnabled", "a cancel waits for the next heartbeat"),
        (
            capabilities.worker_poll_complete_on_shutdown,
            "frontend.enableCancelWorkerPollsOnShutdown",
            "a task can be handed to a worker that stops, and waits for its timeout",
        ),
    ):
        if has:
            found.append(ok("dynamic config", f"{key} is on"))
        else:
            found.append(broken("dynamic config", f"{key} is off: {lost}", f"set {key}: true as in {_DYNAMIC_CONFIG}"))
    found.append(
        look(
            "dynamic config",
            "a server does not tell whether fairness and the pushed cancel are on, or its poll rates",
            f"compare its file with {_DYNAMIC_CONFIG}: matching.enableFairness, "
            "system.enableCancelActivityWorkerCommand, history.*ProcessorMaxPollRPS, history.maxInFlightUpdates",
        )
    )
    return found


async def _search_attributes(client: Client) -> list[Finding]:
    try:
        await check_search_attributes(client)
    except ConfigurationError as error:
        detail, _, command = str(error).partition(": temporal ")
        return [
            broken("search attributes", detail, f"temporal {command}" if command else "remove it and register ours")
        ]
    return [ok("search attributes", f"all {len(naming.SEARCH_ATTRIBUTES)} are registered")]


async def _partitions(client: Client, settings: Settings) -> list[Finding]:
    found = []
    for pool in _pools(settings):
        queue = naming.gpu_queue(pool)
        reply = await client.workflow_service.list_task_queue_partitions(
            ListTaskQueuePartitionsRequest(namespace=client.namespace, task_queue=TaskQueue(name=queue))
        )
        count = len(reply.activity_task_queue_partitions)
        if count == 1:
            found.append(ok("partitions", f"{queue} has one partition: priority and fairness are exact"))
        else:
            found.append(
                broken(
                    "partitions",
                    f"{queue} has {count} partitions: priority holds within each only",
                    f"set matching.numTaskqueueReadPartitions and …WritePartitions to 1, as in {_DYNAMIC_CONFIG}",
                )
            )
    return found


async def _payloads(client: Client, settings: Settings) -> list[Finding]:
    """Whether this machine's keys read what Temporal stores."""
    try:
        codec = codec_from(settings)
    except CodecKeyError:
        return []  # Said already.
    rows = client.list_workflows("WorkflowType = 'GenerationWorkflow'", page_size=_NEWEST)
    await rows.fetch_next_page()
    unread: Counter[str] = Counter()
    for row in rows.current_page or ():
        payload = row.raw_info.memo.fields.get(naming.MEMO_REQUEST)
        if payload is None:
            continue
        try:
            await codec.decode([payload])
        except CodecKeyError:
            unread[payload.metadata.get(KEY_ID_FIELD, b"").decode("ascii", errors="replace")] += 1
    if unread:
        ids = ", ".join(f"{count} with {key_id!r}" for key_id, count in sorted(unread.items()))
        return [
            broken(
                "payloads",
                f"of the newest {_NEWEST} tasks these cannot be read: {ids}",
                "put the missing key back behind the first one, here and on every process, until the retention has "
                "passed",
            )
        ]
    return [ok("payloads", f"the newest {len(rows.current_page or ())} tasks can be read")]


async def _workers(client: Client, settings: Settings) -> list[Finding]:
    starts = {naming.CONTROL_QUEUE: "reelgate worker control", naming.CALLBACK_QUEUE: "reelgate worker callback"}
    starts |= {naming.gpu_queue(pool): f"reelgate worker gpu --pool {pool}" for pool in _pools(settings)}
    reply = await client.workflow_service.list_workers(ListWorkersRequest(namespace=client.namespace, page_size=PAGE))
    interval = timedelta(seconds=settings.worker_heartbeat_seconds)
    builds: dict[str, list[str]] = {}
    for beat in (info.worker_heartbeat for info in reply.workers_info):
        if is_live(beat, interval):
            # An unversioned worker has a build id too, a checksum of its own, but no deployment.
            version = beat.deployment_version
            builds.setdefault(beat.task_queue, []).append(version.build_id if version.deployment_name else "")
    found = []
    for queue, command in starts.items():
        live = builds.get(queue, [])
        if not live:
            silent = f"none on {queue} was heard of for {silence_of(interval).total_seconds():g} s"
            found.append(broken("workers", silent, f"start one: {command}"))
        elif not await _get_work(client, queue, set(live)):
            versions = ", ".join(sorted(set(live)))
            idle = f"{len(live)} on {queue} get no work: version {versions} is not the current one"
            found.append(broken("workers", idle, f"reelgate deploy current {queue} {max(live)}"))
        else:
            found.append(ok("workers", f"{len(live)} on {queue}"))
    return found


async def _get_work(client: Client, queue: str, builds: set[str]) -> bool:
    """Whether one of these versions (empty: unversioned) is given the tasks of a queue."""
    if "" in builds:
        return True
    control = queue == naming.CONTROL_QUEUE
    reply = await client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=client.namespace,
            task_queue=TaskQueue(name=queue),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW
            if control
            else TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
        )
    )
    routing = reply.versioning_info
    return bool(builds & {routing.current_deployment_version.build_id, routing.ramping_deployment_version.build_id})


async def clock(client: Client, *, now: Callable[[], float] = time.time) -> list[Finding]:
    """Compare this machine's clock with the server's: link expiry, signatures and heartbeats depend on both.

    Args:
        client: of the server.
        now: this machine's clock, unix seconds.
    """
    queue, identity = TaskQueue(name=_CLOCK_QUEUE), f"doctor {time.time_ns()}"
    poll = asyncio.create_task(
        client.workflow_service.poll_workflow_task_queue(
            PollWorkflowTaskQueueRequest(namespace=client.namespace, task_queue=queue, identity=identity),
            timeout=_LIMIT,
        )
    )
    describe = DescribeTaskQueueRequest(
        namespace=client.namespace,
        task_queue=queue,
        task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
        report_pollers=True,
    )
    before = now()
    try:
        while True:
            reply = await client.workflow_service.describe_task_queue(describe)
            after = now()
            seen = [poller for poller in reply.pollers if poller.identity == identity]
            if seen:
                break
            await asyncio.sleep(0.05)
    finally:
        poll.cancel()
        with suppress(asyncio.CancelledError, RPCError):
            await poll
    server = seen[0].last_access_time.ToDatetime(tzinfo=UTC).timestamp()
    # It was some moment between the two; outside of them by more than the limit, the clocks differ.
    skew = max(before - server, server - after, 0.0)
    if skew <= MAX_SKEW_SECONDS:
        return [ok("clock", f"within {max(skew, after - before):.1f} s of the server's")]
    return [broken("clock", f"{skew:.0f} s off the server's", "synchronise both machines (chrony, systemd-timesyncd)")]


def _pools(settings: Settings) -> list[str]:
    try:
        return sorted({spec.pool for spec in catalogue(settings)})
    except ConfigurationError:
        return [settings.pool]  # The line about the models says what is wrong.
