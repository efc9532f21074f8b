"""The state a client sees, for every way in which a run can stand or have ended."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from activities.inference.catalogue import load_catalogue
from api.jobs import Closing, Job, PendingAttempt
from api.task_view import TaskViews, cancel_requested, outcome_of
from workers.links import SignedLinks
from workers.settings import Settings
from workflows.failures import FailureCode
from workflows.states import TaskStatus
from workflows.tasks import (
    CancelMode,
    GenerationInput,
    GenerationParameters,
    Phase,
    Progress,
    TaskRecord,
    User,
)

T0 = datetime(2026, 1, 31, 12, tzinfo=UTC)
REQUEST = GenerationInput(
    task_id="t" + "a" * 26,
    user=User(tenant="acme"),
    parameters=GenerationParameters(
        model="m",
        prompt="p",
        width=64,
        height=64,
        num_frames=5,
        fps=8.0,
        num_inference_steps=4,
        guidance_scale=1.0,
        seed=1,
    ),
    model_revision="1",
    pool="default",
    artifact_key="k",
    accepted_at=T0,
)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def job(**changes: object) -> Job:
    return replace(Job(request=REQUEST, status=TaskStatus.QUEUED, opened_at=T0), **changes)  # type: ignore[arg-type]


def record(status: TaskStatus, **changes: object) -> TaskRecord:
    base = TaskRecord(task_id=REQUEST.task_id, status=status, created_at=T0, queued_at=T0, updated_at=at(60))
    return replace(base, **changes)  # type: ignore[arg-type]


RUNNING = PendingAttempt(started_at=at(5), progress=None)
WAITING = PendingAttempt(started_at=None, progress=None)


@pytest.mark.parametrize(
    ("given", "status", "code"),
    [
        (job(), "QUEUED", None),
        (job(attempt=WAITING), "QUEUED", None),
        (job(attempt=RUNNING), "PROCESSING", None),
        (job(status=TaskStatus.PROCESSING, attempt=RUNNING), "PROCESSING", None),
        (job(status=TaskStatus.CANCELED, attempt=RUNNING), "CANCELED", None),
        (job(status=TaskStatus.PROCESSING, cancel_sent=True), "PROCESSING", None),
        (job(closing=Closing.COMPLETED, record=record(TaskStatus.SUCCEEDED, finished_at=at(60))), "SUCCEEDED", None),
        (
            job(
                closing=Closing.FAILED,
                record=record(TaskStatus.TIMEOUT, finished_at=at(60), error_code=FailureCode.QUEUE_TIMEOUT),
            ),
            "TIMEOUT",
            "QUEUE_TIMEOUT",
        ),
        (job(closing=Closing.CANCELED), "CANCELED", "CANCELED"),
        (job(closing=Closing.ENDED_FROM_OUTSIDE), "CANCELED", "TERMINATED"),
        (job(closing=Closing.ENDED_FROM_OUTSIDE, status=TaskStatus.PROCESSING), "CANCELED", "TERMINATED"),
        (job(closing=Closing.ENDED_FROM_OUTSIDE, record=record(TaskStatus.QUEUED)), "CANCELED", "TERMINATED"),
        # Terminated while it gave its places back: the end was decided and told to the receiver.
        (
            job(closing=Closing.ENDED_FROM_OUTSIDE, record=record(TaskStatus.SUCCEEDED, finished_at=at(60))),
            "SUCCEEDED",
            None,
        ),
        (job(closing=Closing.FAILED), "FAILED", "INTERNAL"),
    ],
)
def test_the_state_of_a_job(given: Job, status: str, code: str | None) -> None:
    outcome = outcome_of(given)
    assert (outcome.status, outcome.error_code) == (status, code)
    assert (outcome.error_message is not None) == (code not in (None, "QUEUE_TIMEOUT"))


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        (job(), None),
        (job(cancel_sent=True), CancelMode.HARD),
        (job(status=TaskStatus.CANCELED), CancelMode.SOFT),
        (job(status=TaskStatus.CANCELED, cancel_sent=True), CancelMode.HARD),
        (job(closing=Closing.CANCELED), CancelMode.HARD),
        (job(closing=Closing.ENDED_FROM_OUTSIDE), None),
        (
            job(
                closing=Closing.FAILED,
                record=record(TaskStatus.CANCELED, finished_at=at(9), cancel_requested=CancelMode.SOFT),
            ),
            CancelMode.SOFT,
        ),
    ],
)
def test_the_cancel_that_was_asked_for(given: Job, mode: CancelMode | None) -> None:
    assert cancel_requested(given) is mode


@pytest.fixture
def views() -> TaskViews:
    settings = Settings(public_url="https://gate.example", web_ui_url="https://ui.example", namespace="prod")
    return TaskViews(settings, SignedLinks(settings.public_url, "s" * 32), load_catalogue())


def test_times_and_attempts_of_a_second_attempt(views: TaskViews) -> None:
    progress = Progress(
        attempt=2, worker_id="host/cuda:1", phase=Phase.DECODE, percent=91.26, eta_seconds=3.21, gpu_seconds=2.0
    )
    before = record(
        TaskStatus.QUEUED,
        started_at=at(10),
        durations={"QUEUED": 10.0, "PROCESSING": 50.0},
        attempt_count=1,
        retry_count=1,
        gpu_seconds=40.0,
        worker_id="host/cuda:0",
    )
    task = views.task(
        job(status=TaskStatus.PROCESSING, record=before, attempt=PendingAttempt(started_at=at(70), progress=progress))
    )
    assert (task.attempt, task.retry_count, task.gpu_seconds, task.worker_id) == (2, 1, 42.0, "host/cuda:1")
    assert (task.started_at, task.updated_at, task.finished_at) == (at(10), at(70), None)
    assert task.durations == {"QUEUED": 20.0, "PROCESSING": 50.0}
    assert task.progress is not None
    assert (task.progress.phase, task.progress.percent, task.progress.eta_seconds) == ("decode", 91.3, 3.2)


def test_links_lead_to_the_api_and_to_the_web_ui(views: TaskViews) -> None:
    links = views.task(job()).links
    assert links.self == f"https://gate.example/api/v1/tasks/{REQUEST.task_id}"
    assert links.web_ui == f"https://ui.example/namespaces/prod/workflows/{REQUEST.task_id}"


def test_a_task_terminated_in_the_queue_spent_its_time_there(views: TaskViews) -> None:
    task = views.task(job(closing=Closing.ENDED_FROM_OUTSIDE, closed_at=at(30)))
    assert task.durations == {"QUEUED": 30.0}
    assert (task.is_terminal, task.finished_at, task.started_at) == (True, at(30), None)


def test_times_on_the_wire_are_utc_with_milliseconds(views: TaskViews) -> None:
    wire = views.task(job(opened_at=datetime.fromisoformat("2026-01-31T13:00:00.123987+01:00"))).model_dump(mode="json")
    assert (wire["created_at"], wire["queued_at"]) == ("2026-01-31T12:00:00.000Z", "2026-01-31T12:00:00.123Z")
