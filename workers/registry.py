"""What each kind of worker is made of: its task queue, workflows, activities and the parts behind them.

The only place where settings become constructor arguments. A kind imports what it needs when it is built, so that
control and callback workers start without numpy, torch or a video encoder installed.
"""

from __future__ import annotations

import compileall
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from temporalio.client import Client

import workflows
from activities.admission import AdmissionListings
from activities.artifacts import ArtifactRepository
from activities.batches import BatchItems
from activities.callbacks import LOCAL_ATTEMPTS, CallbackDelivery
from activities.dns_cache import DnsCache, SystemResolver
from activities.http_guard import GuardedClient
from activities.inference.catalogue import Catalogue, load_catalogue
from activities.inference.specs import CatalogueError, UnknownModelError
from activities.retention import Retention, ensure_retention_schedule
from activities.rollout import RolloutSteps
from activities.storage import ObjectStore
from workers.callback_metrics import CallbackMetrics, GateCollector
from workers.ended_runs import EndedRuns
from workers.errors import ConfigurationError
from workers.keys import KeyRing
from workers.links import links_from
from workers.metrics import process_registry
from workers.parts import Parts, callback_slots, control_slots
from workers.settings import Settings
from workers.task_metrics import TaskMetrics
from workflows.admission import AdmissionWorkflow
from workflows.batch import BatchWorkflow
from workflows.callback import CallbackWorkflow
from workflows.generation import GenerationWorkflow
from workflows.naming import CALLBACK_QUEUE, CONTROL_QUEUE, gpu_queue
from workflows.retention import RetentionWorkflow
from workflows.rollout import RolloutWorkflow

if TYPE_CHECKING:
    from workers.tracing import Tracing

CONTROL_WORKFLOWS: Final[Sequence[type]] = (
    GenerationWorkflow,
    AdmissionWorkflow,
    BatchWorkflow,
    RetentionWorkflow,
    RolloutWorkflow,
)
CALLBACK_WORKFLOWS: Final[Sequence[type]] = (CallbackWorkflow,)
WORKFLOWS: Final[Sequence[type]] = (*CONTROL_WORKFLOWS, *CALLBACK_WORKFLOWS)
"""Every workflow. The replay tests replay histories against these."""


class WorkerKind(StrEnum):
    """Kinds of worker, each with task queues and limits of its own."""

    GPU = "gpu"
    CALLBACK = "callback"
    CONTROL = "control"


def task_queue(kind: WorkerKind, settings: Settings) -> str:
    """Task queue that a kind of worker polls."""
    match kind:
        case WorkerKind.GPU:
            return gpu_queue(settings.pool)
        case WorkerKind.CALLBACK:
            return CALLBACK_QUEUE
        case WorkerKind.CONTROL:
            return CONTROL_QUEUE


def object_store(settings: Settings) -> ObjectStore:
    """The store of clips, posters and input images.

    Raises:
        ConfigurationError: the URL or an option is wrong.
    """
    try:
        return ObjectStore.from_url(settings.store_url, options=settings.clear_store_options())
    except ValueError as error:
        raise ConfigurationError(f"REELGATE_STORE_URL, REELGATE_STORE_OPTIONS(_FILE): {error}") from error


def catalogue(settings: Settings) -> Catalogue:
    """The models that are offered.

    Raises:
        ConfigurationError: the models file or a model setting is wrong.
    """
    try:
        return load_catalogue(settings.models_file, extra_builtin=settings.extra_models)
    except (CatalogueError, UnknownModelError) as error:
        raise ConfigurationError(f"REELGATE_MODELS_FILE, REELGATE_EXTRA_MODELS: {error}") from error


def key_ring(settings: Settings) -> KeyRing:
    """Keys, callback secrets and endpoint settings.

    Raises:
        KeysFileError: the file is missing or wrong.
    """
    return KeyRing(settings.keys_file)


def parts_of(
    kind: WorkerKind, settings: Settings, client: Client, tracing: Tracing | None = None
) -> AbstractAsyncContextManager[Parts]:
    """Build what a worker needs; entered before it polls, left after it has drained.

    With `tracing`, callbacks tell their receivers of the trace that they belong to.

    Raises:
        ConfigurationError: a file or a setting is wrong; the message names it.
    """
    match kind:
        case WorkerKind.GPU:
            from workers.gpu_parts import gpu_parts  # noqa: PLC0415 - numpy and a video encoder, on GPU workers only

            return gpu_parts(settings, client, store=object_store(settings), catalogue=catalogue(settings))
        case WorkerKind.CALLBACK:
            return _callback_parts(settings, tracing)
        case WorkerKind.CONTROL:
            return _control_parts(settings, client)


def keep_workflows_compiled() -> bool:
    """Write the bytecode of the workflow modules where it is missing or older than its source; False if that failed.

    The sandbox runs a workflow's module once for each of its runs. Without a bytecode file, as where
    PYTHONDONTWRITEBYTECODE is set, it would compile the module each time, which takes longer than all else it does.
    """
    return bool(compileall.compile_dir(Path(workflows.__file__).parent, quiet=2))


@asynccontextmanager
async def _control_parts(settings: Settings, client: Client) -> AsyncIterator[Parts]:
    store = object_store(settings)
    artifacts = ArtifactRepository(store, retention=settings.retention)
    retention = Retention(store, retention=settings.retention)
    admission = AdmissionListings(client)
    batches = BatchItems(client, store)
    rollout = RolloutSteps(client)
    await ensure_retention_schedule(client)
    registry = process_registry(WorkerKind.CONTROL, settings)
    keep_workflows_compiled()
    yield Parts(
        task_queue=CONTROL_QUEUE,
        workflows=CONTROL_WORKFLOWS,
        tuner=control_slots(),
        activities=(
            artifacts.find_artifact,
            artifacts.remove_artifacts,
            retention.remove_expired,
            admission.list_running_tasks,
            admission.list_used,
            batches.run_batch_step,
            batches.cancel_batch_items,
            batches.remove_batch_items,
            rollout.begin_rollout,
            rollout.set_canary_share,
            rollout.observe_rollout,
            rollout.settle_rollout,
        ),
        metrics=registry,
        interceptors=(EndedRuns(task=TaskMetrics(registry).note),),
    )


@asynccontextmanager
async def _callback_parts(settings: Settings, tracing: Tracing | None) -> AsyncIterator[Parts]:
    keys = key_ring(settings)
    registry = process_registry(WorkerKind.CALLBACK, settings)
    metrics = CallbackMetrics(registry)
    keep_workflows_compiled()
    async with guarded_client(settings) as client:
        delivery = CallbackDelivery(
            secrets=keys,
            endpoints=keys,
            links=links_from(settings),
            client=client,
            concurrency=settings.callback_endpoint_concurrency,
            total_timeout=settings.callback_timeout_seconds,
            observe=metrics.observe,
            request_out=tracing.request_out if tracing is not None else None,
        )
        registry.register(GateCollector(delivery.gate))
        try:
            yield Parts(
                task_queue=CALLBACK_QUEUE,
                workflows=CALLBACK_WORKFLOWS,
                activities=(delivery.deliver_callback,),
                tuner=callback_slots(settings.callback_slots, LOCAL_ATTEMPTS),
                metrics=registry,
                interceptors=(EndedRuns(callback=metrics.note),),
            )
        finally:
            await delivery.aclose()


@asynccontextmanager
async def guarded_client(settings: Settings) -> AsyncIterator[GuardedClient]:
    """A client for URLs that our clients name: receivers of callbacks, hosts of input images."""
    resolver = SystemResolver()
    client = GuardedClient(
        settings.egress_policy(),
        DnsCache(resolver, ttl=settings.dns_ttl_seconds, stale_if_error=settings.dns_stale_seconds),
        user_agent=f"reelgate/{settings.build_id}",
        max_connections=settings.callback_connections,
        max_keepalive=settings.callback_keepalive_connections,
        connect_timeout=settings.callback_connect_timeout_seconds,
    )
    try:
        yield client
    finally:
        await client.aclose()
        resolver.close()
