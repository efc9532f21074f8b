"""Submitting a task: from a checked body to a durable job, once however often the request is sent.

A task id is a hash of the user and an idempotency key and has exactly one run, so Temporal itself makes parallel
equal submissions meet. What runs again is the next link of a chain: its id is a hash that includes the id of the
link that ended, so that parallel repeats meet there too.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from api.auth import Caller
from api.chains import Chains
from api.intake import Intake
from api.jobs import Job, Jobs
from api.problems import (
    AdmissionUnavailableError,
    GatewayError,
    IdempotencyKeyReusedError,
    QueueFullError,
    QuotaExhaustedError,
    RateLimitedError,
    TemporalUnavailableError,
    TooManyPendingTasksError,
)
from api.request_plan import CheckedRequest, RequestPlans
from api.schemas import GENERATION_FIELDS, UNKEYED_FIELDS, Submit
from api.task_view import outcome_of
from workflows import naming
from workflows.states import TaskStatus
from workflows.tasks import GenerationInput

ENDS_WITHIN: Final = timedelta(seconds=3)
"""How long a canceled task that cannot be taken back is waited for: a step and what follows it."""
MAX_ROUNDS: Final = 5
"""Each round lost means that another request moved the chain on in the same moment."""

_LIMITS: Final = (
    AdmissionUnavailableError,
    QueueFullError,
    QuotaExhaustedError,
    RateLimitedError,
    TooManyPendingTasksError,
)
"""What a new task can be refused with and a repetition cannot."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """The task that answers a submission."""

    job: Job
    replayed: bool
    """It existed already."""


class Submissions:
    """Accepts tasks.

    Args:
        jobs: the tasks there are.
        chains: what was started for a key.
        plans: checks requests and makes tasks of them.
        intake: starts the new ones.
    """

    def __init__(self, *, jobs: Jobs, chains: Chains, plans: RequestPlans, intake: Intake) -> None:
        self._jobs = jobs
        self._chains = chains
        self._plans = plans
        self._intake = intake

    async def submit(self, caller: Caller, body: Submit, idempotency_key: str | None) -> Submitted:
        """Start the task that the request asks for, or find the one that answers it.

        Args:
            caller: who asks.
            body: what was sent.
            idempotency_key: the client's own; None derives one from what was sent.

        Raises:
            GatewayError: the request is refused, or Temporal or the store does not answer in time.
        """
        user = caller.user
        checked = await self._plans.check(caller, body)
        if idempotency_key is not None:
            key = naming.explicit_key(idempotency_key)
        else:
            key = naming.derived_key({k: v for k, v in checked.fields.items() if k not in UNKEYED_FIELDS})
        explicit = idempotency_key is not None
        start = partial(self._start, caller, checked, key, explicit=explicit)
        refusal: GatewayError | None = None
        # What was never asked for here is new nearly always, so it is not looked up: the start of what exists fails,
        # and no limit concerns it.
        if self._chains.is_first_heard(user, key):
            try:
                if (started := await start(after=None)) is not None:
                    return started
            except _LIMITS as error:
                refusal = error
        chain = await self._chains.links(user, key)
        if refusal is not None and not chain:
            raise refusal
        for _ in range(MAX_ROUNDS):
            answer = await self._answer(chain, checked, explicit=explicit)
            if answer is not None:
                return Submitted(job=answer, replayed=True)
            if (started := await start(after=chain[-1].request.task_id if chain else None)) is not None:
                return started
            chain = await self._chains.links(user, key)
        raise TemporalUnavailableError("Too many equal requests at the same time; repeat this one.")

    async def _answer(self, chain: list[Job], checked: CheckedRequest, *, explicit: bool) -> Job | None:
        """The task that answers the request, or None when a new link is to start.

        Raises:
            IdempotencyKeyReusedError: the client's key belongs to another request.
        """
        if not chain:
            return None
        newest = chain[-1]
        if explicit:
            if newest.request.fingerprint != naming.fingerprint(checked.fields):
                raise IdempotencyKeyReusedError(
                    f"The Idempotency-Key belongs to task {newest.request.task_id}, which was sent with another body."
                )
            # In whatever state: a repeat by the network must not undo a cancel.
            return newest
        if newest.closing is None:
            return await self._alive(newest)
        if checked.regenerate:
            return None
        return next((job for job in reversed(chain) if _still_answers(job)), None)

    async def _alive(self, job: Job) -> Job | None:
        """The open job; a soft cancel of it is taken back."""
        if job.status is not TaskStatus.CANCELED:
            return job
        if not await self._jobs.revive(job.request.task_id):
            # It is about to end, and only its end says whether it has a clip.
            await self._jobs.wait_closed(job.request.task_id, ENDS_WITHIN)
        # Revived or ended: what it is now decides, and a closed one starts another round.
        current = await self._jobs.describe(job.request.task_id)
        if current is None or (current.closing is not None and not _still_answers(current)):
            return None
        return current

    async def _start(
        self, caller: Caller, checked: CheckedRequest, key: str, *, after: str | None, explicit: bool
    ) -> Submitted | None:
        """Start the task that follows `after` in its chain; None when it is there already."""
        request = self._request(caller, checked, key, after=after, explicit=explicit)
        if not await self._intake.start(caller, request, checked.image):
            return None
        return Submitted(
            job=Job(request=request, status=TaskStatus.QUEUED, opened_at=request.accepted_at), replayed=False
        )

    def _request(
        self, caller: Caller, checked: CheckedRequest, key: str, *, after: str | None, explicit: bool
    ) -> GenerationInput:
        user = caller.user
        if explicit or checked.regenerate:
            seed = naming.task_seed(naming.task_id(user, key, after=after))
        else:
            seed = naming.derived_seed(user, {k: v for k, v in checked.fields.items() if k in GENERATION_FIELDS})
        return self._plans.plan(caller, checked, key, seed=seed, after=after)


def _still_answers(job: Job) -> bool:
    """Whether an ended task has a clip to answer with."""
    if outcome_of(job).status is not TaskStatus.SUCCEEDED:
        return False
    artifact = job.record.artifact if job.record else None
    return artifact is None or artifact.expires_at > datetime.now(UTC)
