"""What a client sees of a job: a pure function from what Temporal describes to the wire shape.

The rules for runs that did not end by their own code stand here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from activities.inference.catalogue import Catalogue, UnknownModelError
from api.jobs import Closing, Delivery, Job
from api.prompt_advice import advice
from api.schemas import Task, TaskItem, TaskLinks, TaskParameters, TaskProgress, TaskQueue, TaskResult, TaskWarning
from workers.links import SignedLinks
from workers.settings import Settings
from workflows.failures import FAILURE_CLASSES, FailureCode
from workflows.states import ENDED, TaskStatus
from workflows.tasks import Artifact, CancelMode


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The state of a job as a client is to see it."""

    status: TaskStatus
    error_code: FailureCode | None = None
    error_message: str | None = None


def outcome_of(job: Job) -> Outcome:
    """Decide the state of a job from its attribute, its record, its pending attempt and how it was closed."""
    record = job.record
    if record is not None and record.finished_at is not None and record.status in ENDED:
        # The run decided how it ends, and told the receiver of its callback. Whatever closes it afterwards
        # (a terminate while it gives its places back) changes nothing.
        return Outcome(status=record.status, error_code=record.error_code, error_message=record.error_message)
    if job.closing is None:
        return Outcome(status=_open_status(job))
    match job.closing:
        case Closing.ENDED_FROM_OUTSIDE:
            return _failed_as(FailureCode.TERMINATED)
        case Closing.CANCELED:
            return _failed_as(FailureCode.CANCELED)
        case Closing.COMPLETED:
            return Outcome(status=TaskStatus.SUCCEEDED)
        case Closing.FAILED:
            return _failed_as(FailureCode.INTERNAL)


def _open_status(job: Job) -> TaskStatus:
    if job.status is TaskStatus.QUEUED and job.attempt is not None and job.attempt.started_at is not None:
        # The worker has the task; its signal is on the way, or waits for a control worker.
        return TaskStatus.PROCESSING
    return job.status


def _failed_as(code: FailureCode) -> Outcome:
    row = FAILURE_CLASSES[code]
    return Outcome(status=row.status, error_code=code, error_message=row.message)


def cancel_requested(job: Job) -> CancelMode | None:
    """Which cancel was asked for, if any."""
    record = job.record
    if record is not None and record.finished_at is not None:
        return record.cancel_requested
    if job.cancel_sent or job.closing is Closing.CANCELED:
        return CancelMode.HARD
    if job.closing is None and job.status is TaskStatus.CANCELED:
        return CancelMode.SOFT
    return None


class TaskViews:
    """Builds the wire shape of tasks."""

    def __init__(self, settings: Settings, links: SignedLinks, catalogue: Catalogue) -> None:
        self._settings = settings
        self._links = links
        self._catalogue = catalogue
        self._base = f"{settings.public_url}/api/v1/tasks"

    def self_link(self, task_id: str) -> str:
        """URL of a task."""
        return f"{self._base}/{task_id}"

    def task(self, job: Job, *, delivery: Delivery | None = None, queue: TaskQueue | None = None) -> Task:
        """The task behind a job.

        Args:
            job: as described.
            delivery: its callback, once there is one.
            queue: where it stands in its queue, while it waits.
        """
        item = self.item(job, queue=queue)
        return Task(
            **dict(item),
            warnings=self._warnings(job),
            callback_status=delivery.status if delivery else None,
            callback_attempts=delivery.attempts if delivery else None,
        )

    def _warnings(self, job: Job) -> list[TaskWarning]:
        parameters = job.request.parameters
        try:
            return advice(self._catalogue.get(parameters.model), parameters.prompt)
        except UnknownModelError:
            return []  # It has left the catalogue since.

    def item(self, job: Job, *, queue: TaskQueue | None = None) -> TaskItem:
        """The task behind a job, without its callback."""
        request, record = job.request, job.record
        parameters, outcome = request.parameters, outcome_of(job)
        artifact = record.artifact if record else None
        # What retention has removed, or is about to, is still described; its expiry says why there is no link.
        stored = artifact if artifact and artifact.expires_at > datetime.now(UTC) else None
        times = _Times.of(job)
        return TaskItem(
            task_id=request.task_id,
            status=outcome.status,
            is_terminal=job.closing is not None,
            cancel_requested=cancel_requested(job),
            model=parameters.model,
            priority=request.priority,
            parameters=TaskParameters(
                prompt=parameters.prompt,
                negative_prompt=parameters.negative_prompt,
                width=parameters.width,
                height=parameters.height,
                num_frames=parameters.num_frames,
                fps=parameters.fps,
                num_inference_steps=parameters.num_inference_steps,
                guidance_scale=parameters.guidance_scale,
                seed=parameters.seed,
                image_sha256=parameters.image_sha256,
            ),
            progress=_progress(job),
            queue=queue if outcome.status is TaskStatus.QUEUED and job.closing is None else None,
            worker_id=_worker_id(job),
            attempt=_attempts(job),
            retry_count=record.retry_count if record else 0,
            retry_of=request.retry_of,
            created_at=request.accepted_at,
            queued_at=times.queued_at,
            started_at=times.started_at,
            finished_at=times.finished_at,
            updated_at=times.updated_at,
            durations=times.durations,
            gpu_seconds=round(_gpu_seconds(job), 3),
            result_url=self._links.video_url(request.task_id, stored.expires_at) if stored else None,
            poster_url=self._links.poster_url(request.task_id, stored.expires_at) if stored else None,
            result=_result(artifact) if artifact else None,
            error_code=outcome.error_code,
            error_message=outcome.error_message,
            batch_id=request.batch_id,
            labels=list(request.labels),
            links=TaskLinks(
                self=self.self_link(request.task_id),
                events=f"{self._base}/{request.task_id}/events",
                timeline=f"{self._base}/{request.task_id}/timeline",
                web_ui=self._settings.web_ui_link(request.task_id),
            ),
        )


@dataclass(frozen=True, kw_only=True)
class _Times:
    """When a task was where."""

    queued_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    updated_at: datetime
    durations: dict[str, float]

    @classmethod
    def of(cls, job: Job) -> _Times:
        record = job.record
        if record is not None and record.finished_at is not None:
            return cls(
                queued_at=record.queued_at,
                started_at=record.started_at,
                finished_at=record.finished_at,
                updated_at=record.updated_at,
                durations=_rounded(record.durations),
            )
        # The workflow writes a record only when a round failed; what happened since, the pending attempt tells.
        running_since = job.attempt.started_at if job.attempt else None
        started_at = (record.started_at if record else None) or running_since
        known = [job.opened_at, record.updated_at if record else None, running_since, job.closed_at]
        return cls(
            queued_at=record.queued_at if record else job.opened_at,
            started_at=started_at,
            finished_at=job.closed_at,
            updated_at=max(time for time in known if time is not None),
            durations=_rounded(_durations_so_far(job, running_since)),
        )


def _durations_so_far(job: Job, running_since: datetime | None) -> dict[str, float]:
    durations = dict(job.record.durations) if job.record else {}
    waiting_since = job.record.updated_at if job.record else job.opened_at
    waited_until = running_since or (job.closed_at if job.status is TaskStatus.QUEUED else None)
    if waited_until is not None and waited_until > waiting_since:
        waited = (waited_until - waiting_since).total_seconds()
        durations[TaskStatus.QUEUED] = durations.get(TaskStatus.QUEUED, 0.0) + waited
    return durations


def _rounded(durations: dict[str, float]) -> dict[str, float]:
    return {state: round(seconds, 3) for state, seconds in durations.items()}


def _progress(job: Job) -> TaskProgress | None:
    progress = job.attempt.progress if job.attempt else None
    if progress is None or job.closing is not None:
        return None
    return TaskProgress(
        phase=progress.phase,
        step=progress.step,
        total_steps=progress.total_steps,
        percent=round(progress.percent, 1),
        eta_seconds=round(progress.eta_seconds, 1) if progress.eta_seconds is not None else None,
    )


def _worker_id(job: Job) -> str | None:
    if job.attempt is not None and job.attempt.progress is not None:
        return job.attempt.progress.worker_id
    return (job.record.worker_id if job.record else None) or job.worker_id


def _attempts(job: Job) -> int:
    finished = job.record.attempt_count if job.record else 0
    runs = job.closing is None and job.attempt is not None and job.attempt.started_at is not None
    return finished + (1 if runs else 0)


def _gpu_seconds(job: Job) -> float:
    finished = job.record.gpu_seconds if job.record else 0.0
    progress = job.attempt.progress if job.attempt and job.closing is None else None
    return finished + (progress.gpu_seconds if progress else 0.0)


def _result(artifact: Artifact) -> TaskResult:
    return TaskResult(
        sha256=artifact.sha256,
        bytes=artifact.bytes,
        width=artifact.width,
        height=artifact.height,
        num_frames=artifact.num_frames,
        fps=artifact.fps,
        seed=artifact.seed,
        expires_at=artifact.expires_at,
    )
