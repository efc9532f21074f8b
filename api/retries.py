"""Running an ended task again as its owner: the next link of its chain, with the same parameters.

The id of the next link is a hash that includes the link before, so retries that are sent at the same time start one
task, and a retry of an old link finds what has been started since.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from activities.inference.catalogue import Catalogue
from activities.inference.catalogue import UnknownModelError as NotInCatalogueError
from api.auth import Caller
from api.chains import Chains
from api.intake import Intake
from api.jobs import Job
from api.problems import (
    FieldError,
    TaskNotTerminalError,
    TaskTerminalError,
    TemporalUnavailableError,
    UnknownModelError,
)
from api.readings import Readings
from api.submission import MAX_ROUNDS, Submitted
from api.task_view import outcome_of
from workflows import naming
from workflows.states import TaskStatus
from workflows.tasks import GenerationInput


@dataclass(frozen=True, kw_only=True)
class Retries:
    """Retries tasks."""

    chains: Chains
    readings: Readings
    intake: Intake
    catalogue: Catalogue

    async def retry(self, caller: Caller, task_id: str) -> Submitted:
        """Start the task that follows the caller's, or find the one that was started already.

        Raises:
            TaskNotFoundError: there is none, or it is another user's.
            TaskNotTerminalError: it has not ended.
            TaskTerminalError: it succeeded, there is nothing to repeat.
            GatewayError: a limit of the user is reached, or Temporal does not answer in time.
        """
        asked = await self.readings.fresh(caller, task_id)
        if asked.closing is None:
            task = (await self.readings.of(asked)).task
            raise TaskNotTerminalError("The task has not ended; cancel it, or wait for its end.", task=task)
        if outcome_of(asked).status is TaskStatus.SUCCEEDED:
            task = (await self.readings.of(asked)).task
            raise TaskTerminalError("The task has succeeded: submit with `regenerate` for another clip.", task=task)
        for _ in range(MAX_ROUNDS):
            newest = (await self.chains.links_from(asked))[-1]
            if newest is not asked and (newest.closing is None or outcome_of(newest).status is TaskStatus.SUCCEEDED):
                return Submitted(job=newest, replayed=True)
            request = self.next_request(newest)
            if await self.intake.start(caller, request):
                job = Job(request=request, status=TaskStatus.QUEUED, opened_at=request.accepted_at)
                return Submitted(job=job, replayed=False)
            # Another retry, or the same request sent again, started it in the same moment.
        raise TemporalUnavailableError("Too many equal requests at the same time; repeat this one.")

    def next_request(self, job: Job) -> GenerationInput:
        """The request of the link after an ended job: the same clip, by the revision that the workers have now.

        Raises:
            UnknownModelError: the model is no longer offered.
        """
        request = job.request
        try:
            spec = self.catalogue.get(request.parameters.model)
        except NotInCatalogueError as error:
            rule = FieldError(field="model", rule="known_model", message=str(error))
            raise UnknownModelError(str(error), errors=[rule]) from None
        return replace(
            request,
            task_id=naming.task_id(request.user, request.idempotency_key, after=request.task_id),
            retry_of=request.task_id,
            redriven=False,
            accepted_at=datetime.now(UTC),
            model_revision=spec.revision,
            pool=spec.pool,
            artifact_key=naming.artifact_key(request.user, request.parameters, spec.revision),
            places=(),
        )
