"""The class table and the budget that acts on it."""

from random import Random

import pytest
from temporalio.exceptions import ActivityError, ApplicationError, RetryState, TimeoutType
from temporalio.exceptions import TimeoutError as ActivityTimeoutError

from workflows.attempt_budget import AttemptBudget
from workflows.failures import (
    FAILURE_CLASSES,
    MAX_MESSAGE_LENGTH,
    Backoff,
    FailureCode,
    Remedy,
    client_message,
    code_of_failure,
)
from workflows.states import ENDED, TaskStatus

F = FailureCode
FINAL = {
    F.VALIDATION_FAILED, F.SAFETY_REJECTED, F.INPUT_GONE, F.OUT_OF_MEMORY, F.INVALID_OUTPUT, F.ARTIFACT_TOO_LARGE,
    F.PAYLOAD_TOO_LARGE, F.DEADLINE_EXCEEDED, F.CANCELED, F.TERMINATED,
}  # fmt: skip
FREE = {F.WORKER_SHUTDOWN, F.WORKER_NOT_READY}
TIMEOUTS = {F.PHASE_TIMEOUT, F.PROCESSING_TIMEOUT, F.QUEUE_TIMEOUT, F.DEADLINE_EXCEEDED}
AT_ONCE = {F.WORKER_LOST, F.WORKER_SHUTDOWN, F.QUEUE_TIMEOUT}


def activity_error(cause: BaseException) -> ActivityError:
    error = ActivityError(
        "failed",
        scheduled_event_id=1,
        started_event_id=2,
        identity="w",
        activity_type="generate_clip",
        activity_id="a",
        retry_state=RetryState.MAXIMUM_ATTEMPTS_REACHED,
    )
    error.__cause__ = cause
    return error


def budget() -> AttemptBudget:
    return AttemptBudget(max_attempts=3, max_requeues=2)


def test_every_code_has_a_row_that_ends_in_an_ended_state() -> None:
    assert set(FAILURE_CLASSES) == set(FailureCode)
    assert all(row.status in ENDED and row.message.endswith(".") for row in FAILURE_CLASSES.values())


@pytest.mark.parametrize("code", sorted(FailureCode))
def test_each_row_states_its_policy(code: FailureCode) -> None:
    row = FAILURE_CLASSES[code]
    assert (row.remedy is Remedy.FINAL) == (code in FINAL)
    assert (row.remedy is Remedy.REQUEUE) == (code is F.QUEUE_TIMEOUT)
    if row.remedy is Remedy.RETRY:
        assert row.costs_budget == (code not in FREE)
        assert (row.backoff is Backoff.NONE) == (code in AT_ONCE)
    expected = (
        TaskStatus.TIMEOUT
        if code in TIMEOUTS
        else TaskStatus.CANCELED
        if code in {F.CANCELED, F.TERMINATED}
        else TaskStatus.FAILED
    )
    assert row.status is expected


@pytest.mark.parametrize("code", sorted(FailureCode))
def test_the_budget_allows_what_the_row_says(code: FailureCode) -> None:
    account, rounds = budget(), 1
    while rounds < 40 and account.next_round(code, Random(1)) is not None:
        rounds += 1
    if code in FREE:
        assert rounds == 40
    else:
        assert rounds == (1 if code in FINAL else 3)


def test_exponential_backoff_doubles_and_is_jittered_by_a_fifth() -> None:
    for seed in range(50):
        account = budget()
        first = account.next_round(F.INFERENCE_FAILED, Random(seed))
        second = account.next_round(F.STORAGE_UNAVAILABLE, Random(seed + 1))
        assert first is not None
        assert 1.6 <= first.delay_seconds <= 2.4
        assert second is not None
        assert 3.2 <= second.delay_seconds <= 4.8
    assert len({budget().next_round(F.INTERNAL, Random(s)).delay_seconds for s in range(50)}) > 40  # type: ignore[union-attr]


def test_a_worker_that_is_not_ready_is_tried_at_once_then_ever_more_slowly() -> None:
    account = budget()
    delays = [account.next_round(F.WORKER_NOT_READY, Random(1)) for _ in range(8)]
    assert [d.delay_seconds for d in delays if d] == [0, 1, 2, 4, 8, 16, 30, 30]


def test_another_failure_between_resets_the_not_ready_backoff() -> None:
    account = budget()
    account.next_round(F.WORKER_NOT_READY, Random(1))
    account.next_round(F.WORKER_NOT_READY, Random(1))
    account.next_round(F.WORKER_SHUTDOWN, Random(1))
    after = account.next_round(F.WORKER_NOT_READY, Random(1))
    assert after is not None
    assert after.delay_seconds == 0


@pytest.mark.parametrize(
    ("timeout", "code"),
    [
        (TimeoutType.SCHEDULE_TO_START, F.QUEUE_TIMEOUT),
        (TimeoutType.HEARTBEAT, F.WORKER_LOST),
        (TimeoutType.START_TO_CLOSE, F.PROCESSING_TIMEOUT),
        (TimeoutType.SCHEDULE_TO_CLOSE, F.PROCESSING_TIMEOUT),
    ],
)
def test_server_timeouts_are_named(timeout: TimeoutType, code: FailureCode) -> None:
    cause = ActivityTimeoutError("timeout", type=timeout, last_heartbeat_details=[])
    assert code_of_failure(activity_error(cause)) is code


@pytest.mark.parametrize(
    ("error_type", "code"),
    [
        ("OUT_OF_MEMORY", F.OUT_OF_MEMORY),
        ("WorkerShutdown", F.WORKER_SHUTDOWN),
        ("PayloadsTooLarge", F.PAYLOAD_TOO_LARGE),
        ("PayloadSizeError", F.PAYLOAD_TOO_LARGE),
        ("ZeroDivisionError", F.INTERNAL),
        (None, F.INTERNAL),
    ],
)
def test_application_errors_are_named_and_unknown_ones_are_internal(error_type: str | None, code: FailureCode) -> None:
    assert code_of_failure(activity_error(ApplicationError("x", type=error_type))) is code


def test_internal_errors_keep_their_text_from_the_client() -> None:
    assert "secret path" not in client_message(F.INTERNAL, "secret path")
    assert client_message(F.INFERENCE_FAILED, "Detail.") == "The pipeline failed. Detail."
    assert len(client_message(F.INFERENCE_FAILED, "x" * 10_000)) == MAX_MESSAGE_LENGTH
