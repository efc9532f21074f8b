"""The activity `generate_clip`: one attempt as Temporal sees it.

First it tells its workflow that it has started; if that run is gone, it stops at once. It beats its heart from the
event loop in every phase, whatever the inference process does. Every end is one of: a published artifact, a failure
with a code from the table, or a cancellation, and each comes only when the device is free and the scratch is empty.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from temporalio import activity
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.service import RPCError, RPCStatusCode

from activities.artifacts import ArtifactRepository, PublishRefusedError
from activities.attempt import Attempt, AttemptError, AttemptParts, SafetyChecker
from activities.inference.catalogue import Catalogue, ModelSpec, UnknownModelError
from activities.inference.device import DeviceNotReadyError
from activities.inference.leases import Lease, NoLeaseError
from activities.inference.pool import InferencePool
from activities.inference.run import InferenceError
from activities.storage import ObjectStore, StoreUnavailableError
from workflows.contracts import GENERATE_CLIP, GenerationActivities
from workflows.failures import MAX_MESSAGE_LENGTH, FailureCode
from workflows.tasks import AttemptFailure, AttemptStarted, GenerateClipInput, GenerateClipResult

RPC_SECONDS: Final = 5.0
"""Limit of one call to the server; the SDK's own is not kept."""
RPC_RETRY_SECONDS: Final = 1.0

# Ends that are no fault of the worker: kept out of error logs and failure metrics.
_EXPECTED: Final = frozenset(
    {
        FailureCode.CANCELED,
        FailureCode.INPUT_GONE,
        FailureCode.SAFETY_REJECTED,
        FailureCode.VALIDATION_FAILED,
        FailureCode.WORKER_NOT_READY,
        FailureCode.WORKER_SHUTDOWN,
    }
)

_LIVE_STATES: Final = frozenset(
    {
        PendingActivityState.PENDING_ACTIVITY_STATE_STARTED,
        PendingActivityState.PENDING_ACTIVITY_STATE_PAUSE_REQUESTED,
    }
)

logger = logging.getLogger(__name__)


class ClipGeneration(GenerationActivities):
    """Runs on a GPU pool's queue, in a worker whose slots come from `LeaseSlotSupplier`."""

    def __init__(
        self,
        *,
        client: Client,
        pool: InferencePool,
        artifacts: ArtifactRepository,
        store: ObjectStore,
        catalogue: Catalogue,
        scratch: Path,
        worker_version: str,
        safety: SafetyChecker | None = None,
    ) -> None:
        """`scratch` is a folder for this worker alone; each attempt leaves it as it was."""
        self._client = client
        self._pool = pool
        self._catalogue = catalogue
        self._parts = AttemptParts(store=store, artifacts=artifacts, scratch=scratch, safety=safety)
        self._worker_version = worker_version

    @activity.defn(name=GENERATE_CLIP)
    async def generate_clip(self, attempt: GenerateClipInput) -> GenerateClipResult:
        """Make one attempt at a clip: signal `attempt_started`, generate, encode, publish.

        Raises:
            ApplicationError: `type` is a `FailureCode`, first detail an `AttemptFailure`.
        """
        try:
            with self._pool.leases.take() as lease:
                return await self._with_lease(attempt, lease)
        except NoLeaseError as error:
            raise _failure(FailureCode.WORKER_NOT_READY, str(error)) from None

    async def _with_lease(self, asked: GenerateClipInput, lease: Lease) -> GenerateClipResult:
        attempt = Attempt(asked, lease, self._parts)
        # In a task of its own, which is cancelled once at most: its clean-up cannot be cut short.
        life = asyncio.create_task(self._live(asked, lease, attempt))
        try:
            return await asyncio.shield(life)
        except asyncio.CancelledError:
            return await self._after_cancel(life, attempt)
        except ApplicationError:
            raise
        except Exception as error:
            raise _failure_of(error, attempt) from None

    async def _after_cancel(self, life: asyncio.Task[GenerateClipResult], attempt: Attempt) -> GenerateClipResult:
        """Bring the attempt to its end. A clip that was published meanwhile is a result all the same."""
        life.cancel()
        while not life.done():
            with suppress(asyncio.CancelledError):  # Asked again: it is being done.
                await asyncio.wait({life})
        if not life.cancelled() and life.exception() is None:
            return life.result()
        details = activity.cancellation_details()
        if details is not None and details.worker_shutdown and not details.cancel_requested:
            raise _failure(FailureCode.WORKER_SHUTDOWN, "", attempt) from None
        raise asyncio.CancelledError

    async def _live(self, asked: GenerateClipInput, lease: Lease, attempt: Attempt) -> GenerateClipResult:
        await self._announce(asked, lease)
        async with _heartbeats(attempt, asked.limits.heartbeat_timeout_seconds):
            found = await self._parts.artifacts.find(asked.artifact_key)
            reused = found is not None
            if found is None:
                lease.device.check_ready()
                info = activity.info()
                found = await attempt.make(self._spec(asked), may_publish=lambda: self._is_current(info, asked.token))
        return GenerateClipResult(
            artifact=found,
            worker_id=lease.device.worker_id,
            worker_version=self._worker_version,
            gpu_seconds=attempt.gpu_seconds,
            reused=reused,
        )

    def _spec(self, asked: GenerateClipInput) -> ModelSpec:
        try:
            spec = self._catalogue.get(asked.parameters.model)
        except UnknownModelError:
            message = f"This worker does not offer {asked.parameters.model!r}."
            raise _failure(FailureCode.MODEL_NOT_LOADABLE, message) from None
        if spec.revision != asked.model_revision:
            message = f"This worker has revision {spec.revision} of {spec.name!r}, not {asked.model_revision}."
            raise _failure(FailureCode.MODEL_NOT_LOADABLE, message)
        return spec

    async def _announce(self, asked: GenerateClipInput, lease: Lease) -> None:
        info = activity.info()
        started = AttemptStarted(
            token=asked.token,
            worker_id=lease.device.worker_id,
            started_at=info.started_time,
            queued_at=info.current_attempt_scheduled_time,
            worker_version=self._worker_version,
        )
        try:
            async with asyncio.timeout(RPC_SECONDS):
                await self._run_of(info).signal("attempt_started", started)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                raise _failure(FailureCode.CANCELED, "The run of the task has ended.") from None
            raise _failure(FailureCode.WORKER_NOT_READY, f"The server answered {error.status.name}.") from None
        except TimeoutError:
            raise _failure(FailureCode.WORKER_NOT_READY, "The server did not answer.") from None

    def _run_of(self, info: activity.Info) -> WorkflowHandle[object, object]:
        if info.workflow_id is None:
            raise _failure(FailureCode.INTERNAL, "generate_clip runs only inside a workflow")
        return self._client.get_workflow_handle(info.workflow_id, run_id=info.workflow_run_id)

    async def _is_current(self, info: activity.Info, token: str) -> bool:
        """Whether the run is open and waits for this attempt, uncancelled. Asks until the server answers."""
        run = self._run_of(info)
        while True:
            try:
                async with asyncio.timeout(RPC_SECONDS):
                    described = await run.describe()
                break
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    return False
                logger.warning("describe before publishing: the server answered %s", error.status.name)
            except TimeoutError:
                logger.warning("describe before publishing: the server did not answer")
            await asyncio.sleep(RPC_RETRY_SECONDS)
        if described.status is not WorkflowExecutionStatus.RUNNING:
            return False
        pending = described.raw_description.pending_activities
        return any(item.activity_id == token and item.state in _LIVE_STATES for item in pending)


@asynccontextmanager
async def _heartbeats(attempt: Attempt, timeout: float) -> AsyncIterator[None]:
    """Beat from the event loop, whatever the attempt waits for. The SDK sends at most one in two seconds."""

    async def beat() -> None:
        while True:
            activity.heartbeat(attempt.progress())
            await asyncio.sleep(min(1.0, timeout / 5))

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()


def _failure_of(error: Exception, attempt: Attempt) -> ApplicationError:
    match error:
        case AttemptError() | InferenceError():
            return _failure(error.code, str(error), attempt)
        case DeviceNotReadyError():
            return _failure(FailureCode.WORKER_NOT_READY, str(error), attempt)
        case PublishRefusedError():
            return _failure(FailureCode.CANCELED, "The task no longer waits for this attempt.", attempt)
        case StoreUnavailableError():
            logger.warning("attempt failed: %s", error)
            return _failure(FailureCode.STORAGE_UNAVAILABLE, "", attempt)
        case _:
            # Where it happened, not what it says: that may quote the prompt.
            trace = "".join(traceback.format_tb(error.__traceback__))
            logger.error("attempt failed with %s\n%s", type(error).__name__, trace)
            return _failure(FailureCode.INTERNAL, type(error).__name__, attempt)


def _failure(code: FailureCode, message: str, attempt: Attempt | None = None) -> ApplicationError:
    """The one form in which an attempt fails. Retries are the workflow's business: it counts and waits."""
    detail = (
        AttemptFailure() if attempt is None else AttemptFailure(gpu_seconds=attempt.gpu_seconds, phase=attempt.phase)
    )
    return ApplicationError(
        message[:MAX_MESSAGE_LENGTH],
        detail,
        type=code,
        non_retryable=True,
        category=ApplicationErrorCategory.BENIGN if code in _EXPECTED else ApplicationErrorCategory.UNSPECIFIED,
    )
