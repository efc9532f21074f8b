"""The last stretch of a submission: from a resolved request to a durable job, or to a refusal that leaves nothing."""

from __future__ import annotations

from dataclasses import replace

from temporalio.service import RPCError

from activities.storage import ObjectStore, StoreUnavailableError
from api.admission import Admission
from api.admission_client import Grant
from api.auth import Caller
from api.backlog import Backlog
from api.images import InputImage
from api.jobs import Jobs
from api.problems import StorageUnavailableError
from workflows.tasks import GenerationInput


class Intake:
    """Starts new tasks. Order: queue, places, image, job, so that a refused flood stores nothing.

    Args:
        jobs: where they are started.
        store: where input images go.
        admission: gives the places.
        backlog: keeps the queue bounded.
    """

    def __init__(self, *, jobs: Jobs, store: ObjectStore, admission: Admission, backlog: Backlog) -> None:
        self._jobs = jobs
        self._store = store
        self._admission = admission
        self._backlog = backlog

    async def start(self, caller: Caller, request: GenerationInput, image: InputImage | None = None) -> bool:
        """Start the job of a new task; False when there is a run of this id already, open or closed.

        Args:
            caller: whose tier has the limits.
            request: without places; they are added here.
            image: input image that the request names and the store may not have yet.

        Raises:
            GatewayError: the queue is full, a limit is reached, or Temporal or the store does not answer. After
                TemporalUnavailableError the job may have been started nevertheless: the same key finds it.
        """
        await self._backlog.check(request)
        grant = await self._admission.admit(caller, request)
        try:
            await self._keep(request, image)
            started = await self._jobs.start(replace(request, places=grant.places))
        except (StorageUnavailableError, RPCError):
            # The store came before the job, and what Jobs lets through is Temporal's no: nothing was started.
            await self._admission.withdraw(grant)
            raise
        if not started:
            await self._withdraw_unused(grant)
        return started

    async def _keep(self, request: GenerationInput, image: InputImage | None) -> None:
        if image is None or request.parameters.image_key is None:
            return
        try:
            await self._store.put(request.parameters.image_key, image.content, content_type=image.media_type)
        except StoreUnavailableError as error:
            raise StorageUnavailableError from error

    async def _withdraw_unused(self, grant: Grant) -> None:
        """Another submission started the task, or an earlier try of this one whose answer was lost.

        Equal submissions share their places, so those that the open run carries are in use, whoever started it.
        """
        job = await self._jobs.describe(grant.task_id)
        used = set(job.request.places) if job is not None and job.closing is None else set()
        unused = tuple(place for place in grant.places if place not in used)
        if unused:
            await self._admission.withdraw(replace(grant, places=unused))
