"""The program of one worker process: connect, build, poll, drain, end.

SIGTERM and SIGINT drain: no new work, running activities may finish within the grace, then they are handed back.
A second signal ends the process at once, and so does a drain that hangs. The exit code is 0 after a drain and not 0
when the worker died, so that whatever supervises it starts another.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from datetime import timedelta
from typing import Final

import structlog
from temporalio.client import Client
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.worker import Worker, WorkerDeploymentConfig

from workers.connection import connect, host_name
from workers.devices import resolve_devices
from workers.devserver import free_port
from workers.metrics import worker_page
from workers.parts import Parts
from workers.registry import WorkerKind, parts_of, task_queue
from workers.sandbox import LeanSandbox
from workers.settings import Settings
from workers.telemetry import configure_logging, start_tracing
from workflows.naming import deployment_name

STICKY_TIMEOUT: Final = timedelta(seconds=2)
"""How long a workflow task waits for the worker that ran it last: 17 s became 9 s in a test that killed workers."""
MAX_HEARTBEAT_THROTTLE: Final = timedelta(seconds=2)
"""A cancel reaches an activity with its next heartbeat, so the SDK's 60 s would delay it."""
WATCHDOG_SECONDS: Final = 30.0
"""After the drain's grace: a process that has not ended by then is ended."""

_EXIT_DIED: Final = 1
_EXIT_HUNG: Final = 70
_EXIT_SECOND_SIGNAL: Final = 130

_log = structlog.stdlib.get_logger(__name__)


async def run_worker(kind: WorkerKind, settings: Settings) -> int:
    """Run one worker until it is told to stop; returns the exit code of the process.

    Raises:
        ConnectionFailedError, CodecKeyError, KeysFileError, LinkSecretError: it could not start; the message names
            the setting.
    """
    configure_logging(settings, process=kind)
    drain = asyncio.Event()
    with _stop_signals(drain, grace=settings.worker_drain_seconds):
        listening, address = None, None
        if settings.worker_health_port is not None:
            # A web server, a fifth of the start: not for workers without the port.
            from workers.health import health_address, open_health_port, serve_health  # noqa: PLC0415

            listening = open_health_port(settings.worker_health_port, settings)
            address = health_address(listening, settings)
            settings = with_sdk_metrics(settings)
        name = worker_identity(kind, settings, health=address)
        async with AsyncExitStack() as stack:
            tracing = start_tracing(settings, process=kind)
            if tracing is not None:
                stack.push_async_callback(asyncio.to_thread, tracing.close)
            client = await connect(settings, identity=name, interceptors=[tracing.interceptor] if tracing else [])
            parts = await stack.enter_async_context(parts_of(kind, settings, client, tracing))
            worker = make_worker(kind, settings, client, parts)
            if listening is not None:
                await stack.enter_async_context(
                    serve_health(parts.state, listening, metrics=worker_page(parts.metrics, settings.metrics_bind))
                )
            return await _run_until(drain, worker, name)


def make_worker(kind: WorkerKind, settings: Settings, client: Client, parts: Parts) -> Worker:
    """The SDK worker of a kind, with the options that matter for it. The sandbox stays on."""
    return Worker(
        client,
        task_queue=parts.task_queue,
        workflows=parts.workflows,
        activities=parts.activities,
        workflow_runner=LeanSandbox(),
        tuner=parts.tuner,
        interceptors=parts.interceptors,
        sticky_queue_schedule_to_start_timeout=STICKY_TIMEOUT,
        max_heartbeat_throttle_interval=MAX_HEARTBEAT_THROTTLE,
        default_heartbeat_throttle_interval=MAX_HEARTBEAT_THROTTLE,
        graceful_shutdown_timeout=timedelta(seconds=settings.worker_drain_seconds),
        # What goes through a queue keeps the order that its priorities and fairness keys give it.
        disable_eager_activity_execution=True,
        deployment_config=deployment_of(kind, settings),
    )


def with_sdk_metrics(settings: Settings) -> Settings:
    """Settings with which the SDK exports its metrics: on a loopback port if no address is set.

    The health port shows them beside the worker's own, so that a worker is one target with one address.
    """
    if settings.metrics_bind is not None:
        return settings
    return settings.model_copy(update={"metrics_bind": f"127.0.0.1:{free_port()}"})


def worker_identity(kind: WorkerKind, settings: Settings, *, health: str | None = None) -> str:
    """Name in histories and fleet views: host, devices or kind, process, and where its health port is."""
    what = ",".join(resolve_devices(settings.devices)) if kind is WorkerKind.GPU else kind.value
    return f"{host_name(settings)}/{what} pid {os.getpid()}" + (f" health {health}" if health else "")


def deployment_of(kind: WorkerKind, settings: Settings) -> WorkerDeploymentConfig | None:
    """The Worker Deployment that a worker joins and its version; None: it is outside of any."""
    if not settings.worker_versioning:
        return None
    name = deployment_name(task_queue(kind, settings))
    return WorkerDeploymentConfig(
        version=WorkerDeploymentVersion(deployment_name=name, build_id=settings.build_id),
        use_worker_versioning=True,
        # No workflow names a behaviour of its own: an unversioned worker could not complete such a one.
        default_versioning_behavior=VersioningBehavior.AUTO_UPGRADE,
    )


async def _run_until(drain: asyncio.Event, worker: Worker, name: str) -> int:
    running = asyncio.create_task(worker.run())
    stopping = asyncio.create_task(drain.wait())
    _log.info("worker_started", worker=name, task_queue=worker.task_queue)
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            _log.error("worker_died", worker=name, exc_info=running.exception())
            return _EXIT_DIED
        _log.info("worker_draining", worker=name)
        await worker.shutdown()
        await running
    finally:
        stopping.cancel()
    _log.info("worker_stopped", worker=name)
    return 0


@contextmanager
def _stop_signals(drain: asyncio.Event, *, grace: float) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    watchdog = threading.Timer(grace + WATCHDOG_SECONDS, os._exit, args=(_EXIT_HUNG,))
    watchdog.daemon = True

    def stop() -> None:
        if drain.is_set():
            os._exit(_EXIT_SECOND_SIGNAL)
        drain.set()
        # A thread, since what hangs may be the event loop.
        watchdog.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        watchdog.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
