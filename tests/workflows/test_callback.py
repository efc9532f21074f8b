"""A terminal event arrives, or is given up as its schedule or its receiver says; nothing in between loses it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from temporalio import activity
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import ApplicationError, CancelledError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from tests import receiver as receivers
from tests.activities.couriers import SECRET, courier
from tests.receiver import Receiver
from tests.scale import scaled
from tests.workflows.jobs import callback_worker
from tests.workflows.outboxes import (
    DELIVERED,
    REFUSED,
    Answer,
    Delivery,
    ScriptedDelivery,
    answer,
    record_of,
    start_delivery,
    status_of,
)
from workers.devserver import server_args, temporal_binary
from workflows.callback import CALLBACK_FAILED, MAX_LOGGED_ATTEMPTS, CallbackWorkflow
from workflows.contracts import DELIVER_CALLBACK, CallbackActivities
from workflows.policies import CALLBACK_SCHEDULE_SECONDS
from workflows.tasks import CallbackRecord, CallbackStatus, DeliverCallbackInput, DeliveryAttempt, DeliveryOutcome

HOUR = 3_600.0


def workers(client: Client, delivery: CallbackActivities) -> Worker:
    """A callback worker that ends soon."""
    return callback_worker(
        client,
        delivery,
        max_concurrent_activities=1_000,
        graceful_shutdown_timeout=timedelta(milliseconds=100),
    )


async def events(delivery: Delivery, kind: EventType.ValueType) -> list[datetime]:
    """When events of a kind happened."""
    return [
        event.event_time.ToDatetime(UTC) async for event in delivery.fetch_history_events() if event.event_type == kind
    ]


async def waits(delivery: Delivery) -> list[float]:
    """Seconds that each timer between two attempts was set to, however late a busy machine was."""
    return [
        event.timer_started_event_attributes.start_to_fire_timeout.ToTimedelta().total_seconds()
        async for event in delivery.fetch_history_events()
        if event.event_type == EventType.EVENT_TYPE_TIMER_STARTED
    ]


async def until(delivery: Delivery, status: CallbackStatus, attempts: int = 1) -> None:
    """Wait until the memo shows a state and a number of attempts."""
    async with asyncio.timeout(30):
        while True:
            record = await record_of(delivery)
            if record.status is status and len(record.attempts) >= attempts:
                return
            await asyncio.sleep(0.02)


async def failure_of(delivery: Delivery) -> ApplicationError:
    """The failure that a delivery closed with."""
    with pytest.raises(WorkflowFailureError) as error:
        await delivery.result()
    assert isinstance(error.value.cause, ApplicationError)
    return error.value.cause


async def broken(delivery: DeliverCallbackInput) -> DeliveryAttempt:
    """An attempt that fails with an error, which a local one answers with another through the queue."""
    raise RuntimeError("a bug, or a lost file")


class Late:
    """An attempt that ends a while after it began, whether it is told to stop or not."""

    def __init__(self, ends: Answer, *, seconds: float = 0.3) -> None:
        self._ends = ends
        self._seconds = seconds
        self.arrived = asyncio.Event()

    async def __call__(self, delivery: DeliverCallbackInput) -> DeliveryAttempt:
        self.arrived.set()
        try:
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)  # the receiver had answered already
        return await self._ends(delivery)


class TestSchedule:
    async def test_delivery_at_once_costs_one_workflow_task_one_upsert_and_no_activity_of_the_queue(
        self, client: Client
    ) -> None:
        script = ScriptedDelivery(DELIVERED)
        async with workers(client, script):
            delivery = await start_delivery(client)
            record = await delivery.result()
        assert record.status is CallbackStatus.SUCCEEDED
        assert record.body == '{"the":"body"}'
        assert record.next_attempt_at is None
        assert record == await record_of(delivery)
        assert status_of(await delivery.describe()) == "SUCCEEDED"
        assert len(await events(delivery, EventType.EVENT_TYPE_WORKFLOW_TASK_STARTED)) == 1
        assert len(await events(delivery, EventType.EVENT_TYPE_UPSERT_WORKFLOW_SEARCH_ATTRIBUTES)) == 1
        assert await events(delivery, EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED) == []
        assert await events(delivery, EventType.EVENT_TYPE_TIMER_STARTED) == []

    async def test_worker_that_drains_ends_a_first_attempt_under_way(self, client: Client) -> None:
        late = Late(DELIVERED, seconds=1.0)
        async with callback_worker(client, ScriptedDelivery(late), graceful_shutdown_timeout=timedelta(seconds=10)):
            delivery = await start_delivery(client)
            await late.arrived.wait()
        assert (await asyncio.wait_for(delivery.result(), 5)).status is CallbackStatus.SUCCEEDED

    async def test_attempts_after_the_first_are_activities_of_the_queue(self, client: Client) -> None:
        async with workers(client, ScriptedDelivery(REFUSED, REFUSED, DELIVERED)):
            delivery = await start_delivery(client, schedule=(0.0, 0.0, 0.0))
            await delivery.result()
        assert len(await events(delivery, EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED)) == 2

    async def test_first_attempt_without_a_place_in_the_worker_is_made_through_the_queue(self, client: Client) -> None:
        async with Receiver() as slow, Receiver() as healthy, courier(local_attempts=1, total_timeout=1.0) as sender:
            slow.script(receivers.hang())
            async with workers(client, sender.delivery):
                stuck = await start_delivery(client, slow.url, schedule=(0.0, HOUR))
                await slow.wait_for(1)
                meanwhile = await start_delivery(client, healthy.url)
                record = await meanwhile.result()
                await until(stuck, CallbackStatus.RETRYING)
                afterwards = await start_delivery(client, healthy.url)
                await afterwards.result()
        assert [attempt.number for attempt in record.attempts] == [1]
        assert len(await events(meanwhile, EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED)) == 1
        assert await events(afterwards, EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED) == []

    async def test_failures_are_spaced_by_the_schedule_with_jitter(self, skipping_client: Client) -> None:
        script = ScriptedDelivery(*[REFUSED] * 4, DELIVERED)
        async with workers(skipping_client, script):
            delivery = await start_delivery(skipping_client, schedule=(0.0, 60.0, HOUR, 24 * HOUR, 8.0))
            record = await delivery.result()
        for waited, planned in zip(await waits(delivery), (60.0, HOUR, 24 * HOUR, 8.0), strict=True):
            assert planned * 0.8 <= waited <= planned * 1.2
        assert [attempt.number for attempt in record.attempts] == [1, 2, 3, 4, 5]
        assert len({call.webhook_id for call in script.calls}) == 1
        assert [call.body for call in script.calls] == [None, *['{"the":"body"}'] * 4]
        # PENDING came with the start; RETRYING is written once for four failures.
        assert len(await events(delivery, EventType.EVENT_TYPE_UPSERT_WORKFLOW_SEARCH_ATTRIBUTES)) == 2

    def test_default_schedule_starts_at_once_and_ends_after_three_days(self) -> None:
        assert CALLBACK_SCHEDULE_SECONDS[:5] == (0.0, 1.0, 2.0, 4.0, 8.0)
        assert 71 * HOUR < sum(CALLBACK_SCHEDULE_SECONDS) < 80 * HOUR

    async def test_used_up_schedule_closes_failed_with_the_attempts_readable(self, skipping_client: Client) -> None:
        script = ScriptedDelivery(REFUSED)
        async with workers(skipping_client, script):
            delivery = await start_delivery(skipping_client, schedule=(0.0, 1.0, HOUR))
            failure = await failure_of(delivery)
        assert failure.type == CALLBACK_FAILED
        record = await record_of(delivery)
        assert record.status is CallbackStatus.FAILED
        assert record.next_attempt_at is None
        assert [attempt.status_code for attempt in record.attempts] == [503] * 3
        assert status_of(await delivery.describe()) == "FAILED"

    @pytest.mark.parametrize(("asked", "at_least", "at_most"), [(HOUR, HOUR, 1.1 * HOUR), (1.0, 40.0, 60.0)])
    async def test_retry_after_is_never_undercut_and_never_shortens_the_schedule(
        self, skipping_client: Client, asked: float, at_least: float, at_most: float
    ) -> None:
        busy = answer(DeliveryOutcome.RETRY, status=429, error="HTTP_STATUS", retry_after=asked)
        async with workers(skipping_client, ScriptedDelivery(busy, DELIVERED)):
            delivery = await start_delivery(skipping_client, schedule=(0.0, 50.0))
            await delivery.result()
        assert at_least <= (await waits(delivery))[0] <= at_most

    async def test_state_while_waiting_is_readable_without_a_worker(self, client: Client) -> None:
        async with workers(client, ScriptedDelivery(REFUSED)):
            delivery = await start_delivery(client, schedule=(0.0, HOUR))
            await until(delivery, CallbackStatus.RETRYING)
        record = await record_of(delivery)
        assert record.next_attempt_at is not None
        assert record.next_attempt_at - datetime.now(UTC) > timedelta(minutes=40)
        assert record.body == '{"the":"body"}'
        assert [attempt.body for attempt in record.attempts] == [None]
        assert status_of(await delivery.describe()) == "RETRYING"
        await delivery.terminate()


class TestDeferral:
    async def test_deferred_attempts_count_nothing_and_tell_how_often_they_were_deferred(
        self, skipping_client: Client
    ) -> None:
        busy = answer(DeliveryOutcome.DEFERRED, error="ENDPOINT_BUSY", retry_after=600.0)
        script = ScriptedDelivery(busy, busy, busy, REFUSED, busy, DELIVERED)
        async with workers(skipping_client, script):
            delivery = await start_delivery(skipping_client, schedule=(0.0, 1.0))
            record = await delivery.result()
        assert record.status is CallbackStatus.SUCCEEDED
        assert [call.deferrals for call in script.calls] == [0, 1, 2, 3, 0, 1]
        assert [call.number for call in script.calls] == [1, 1, 1, 1, 2, 2]
        assert [attempt.outcome for attempt in record.attempts] == ["retry", "delivered"]
        for waited in (await waits(delivery))[:3]:
            assert 600 <= waited <= 900

    async def test_endpoint_that_always_defers_is_given_up_in_the_end(self, skipping_client: Client) -> None:
        dead = answer(DeliveryOutcome.DEFERRED, error="BREAKER_OPEN", retry_after=40_000.0)
        async with workers(skipping_client, ScriptedDelivery(dead)):
            delivery = await start_delivery(skipping_client, schedule=(0.0,))
            assert (await failure_of(delivery)).type == CALLBACK_FAILED
        assert (await record_of(delivery)).status is CallbackStatus.FAILED


class TestEnds:
    async def test_receiver_that_says_never_again_is_not_asked_again(self, client: Client) -> None:
        script = ScriptedDelivery(answer(DeliveryOutcome.GIVE_UP, status=410, error="GONE"))
        async with workers(client, script):
            delivery = await start_delivery(client)
            failure = await failure_of(delivery)
        assert "GONE" in str(failure)
        assert len(script.calls) == 1
        assert (await record_of(delivery)).status is CallbackStatus.FAILED

    async def test_retry_now_attempts_at_once_and_uses_up_nothing_of_the_schedule(self, client: Client) -> None:
        script = ScriptedDelivery(REFUSED, REFUSED, REFUSED, DELIVERED)
        async with workers(client, script):
            delivery = await start_delivery(client, schedule=(0.0, HOUR))
            for attempts in (1, 2, 3):
                await until(delivery, CallbackStatus.RETRYING, attempts)
                await delivery.signal(CallbackWorkflow.retry_now)
            record = await asyncio.wait_for(delivery.result(), 30)
        assert record.status is CallbackStatus.SUCCEEDED
        assert len(record.attempts) == 4

    async def test_cancel_while_waiting_closes_canceled_and_reads_as_failed(self, client: Client) -> None:
        async with workers(client, ScriptedDelivery(REFUSED)):
            delivery = await start_delivery(client, schedule=(0.0, HOUR))
            await until(delivery, CallbackStatus.RETRYING)
            await delivery.cancel()
            with pytest.raises(WorkflowFailureError) as error:
                await delivery.result()
        assert isinstance(error.value.cause, CancelledError)
        description = await delivery.describe()
        assert description.status is WorkflowExecutionStatus.CANCELED
        assert status_of(description) == "FAILED"
        assert (await record_of(delivery)).next_attempt_at is None

    @pytest.mark.parametrize("before", [(), (broken,)], ids=["local", "queue"])
    async def test_cancel_that_meets_a_delivery_under_way_loses_to_it(
        self, client: Client, before: tuple[Answer, ...]
    ) -> None:
        late = Late(DELIVERED)
        async with workers(client, ScriptedDelivery(*before, late)):
            delivery = await start_delivery(client)
            await late.arrived.wait()
            await delivery.cancel()
            assert (await delivery.result()).status is CallbackStatus.SUCCEEDED

    @pytest.mark.parametrize("before", [(), (broken,)], ids=["local", "queue"])
    async def test_cancel_that_meets_a_failing_attempt_is_not_lost(
        self, client: Client, before: tuple[Answer, ...]
    ) -> None:
        late = Late(REFUSED)
        async with workers(client, ScriptedDelivery(*before, late)):
            delivery = await start_delivery(client, schedule=(0.0, HOUR))
            await late.arrived.wait()
            await delivery.cancel()
            with pytest.raises(WorkflowFailureError):
                await asyncio.wait_for(delivery.result(), 30)
        assert (await delivery.describe()).status is WorkflowExecutionStatus.CANCELED
        assert [attempt.status_code for attempt in (await record_of(delivery)).attempts] == [503]

    @pytest.mark.parametrize(("ends", "code"), [(DELIVERED, 200), (REFUSED, 503), (broken, None)])
    async def test_cancel_is_told_to_a_first_attempt_under_way_and_waits_for_its_outcome(
        self, client: Client, ends: Answer, code: int | None
    ) -> None:
        late = Late(ends, seconds=2.0)
        async with workers(client, ScriptedDelivery(late)):
            # The workflow hears of it while the attempt lasts, as its task is renewed before this time is over.
            delivery = await start_delivery(client, schedule=(0.0, HOUR), task_timeout=timedelta(seconds=1))
            await late.arrived.wait()
            await delivery.cancel()
            with contextlib.suppress(WorkflowFailureError):
                await asyncio.wait_for(delivery.result(), 30)
        closed = WorkflowExecutionStatus.COMPLETED if ends is DELIVERED else WorkflowExecutionStatus.CANCELED
        assert (await delivery.describe()).status is closed
        assert [attempt.status_code for attempt in (await record_of(delivery)).attempts] == ([code] if code else [])
        assert await events(delivery, EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED) == []
        assert await events(delivery, EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED) == []
        (told,) = await events(delivery, EventType.EVENT_TYPE_WORKFLOW_EXECUTION_CANCEL_REQUESTED)
        (ended,) = await events(delivery, EventType.EVENT_TYPE_MARKER_RECORDED)
        assert told < ended

    async def test_cancel_before_the_first_workflow_task_sends_nothing(self, client: Client) -> None:
        async with Receiver() as receiver:
            delivery = await start_delivery(client, receiver.url)
            await delivery.cancel()
            async with courier() as sender, workers(client, sender.delivery):
                with pytest.raises(WorkflowFailureError):
                    await delivery.result()
            assert (await delivery.describe()).status is WorkflowExecutionStatus.CANCELED
            assert receiver.requests == []

    @pytest.mark.parametrize("answer_status", [200, 503, 410])
    @pytest.mark.parametrize("what", ["cancel", "retry_now"])
    async def test_what_comes_during_a_first_attempt_does_not_send_it_twice(
        self, client: Client, what: str, answer_status: int
    ) -> None:
        async def slowly(exchange: receivers.Exchange) -> None:
            await asyncio.sleep(0.5)
            await receivers.respond(answer_status)(exchange)

        async with Receiver() as receiver, courier() as sender, workers(client, sender.delivery):
            receiver.script(slowly)
            delivery = await start_delivery(client, receiver.url, schedule=(0.0,))
            await receiver.wait_for(1)
            await (delivery.cancel() if what == "cancel" else delivery.signal(CallbackWorkflow.retry_now))
            with contextlib.suppress(WorkflowFailureError):
                await delivery.result()
            # What was asked for and refused is tried once more, and taken.
            again = what == "retry_now" and answer_status == 503
            assert len(receiver.requests) == (2 if again else 1)
        # Where the outcome closes the run, the server refused the workflow task that said so.
        assert len(await events(delivery, EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED)) == 1
        record = await record_of(delivery)
        assert record.attempts[0].status_code == answer_status
        taken = answer_status == 200 or again
        assert record.status is (CallbackStatus.SUCCEEDED if taken else CallbackStatus.FAILED)

    async def test_terminated_delivery_keeps_the_record_of_its_last_attempt(self, client: Client) -> None:
        async with workers(client, ScriptedDelivery(REFUSED)):
            delivery = await start_delivery(client, schedule=(0.0, HOUR))
            await until(delivery, CallbackStatus.RETRYING)
            await delivery.terminate()
        assert [attempt.status_code for attempt in (await record_of(delivery)).attempts] == [503]

    async def test_activity_that_fails_for_good_is_a_counted_attempt(self, client: Client) -> None:
        async def broken(delivery: DeliverCallbackInput) -> DeliveryAttempt:
            raise ApplicationError("too large", type="PayloadsTooLarge")

        # The first failure only sends it to the queue.
        script = ScriptedDelivery(broken, broken, DELIVERED)
        async with workers(client, script):
            delivery = await start_delivery(client, schedule=(0.0, 0.0))
            record = await delivery.result()
        assert [attempt.error_code for attempt in record.attempts] == ["INTERNAL", None]

    async def test_passing_error_of_an_activity_is_retried_by_itself(self, client: Client) -> None:
        async with workers(client, ScriptedDelivery(broken, broken, DELIVERED)):
            delivery = await start_delivery(client, schedule=(0.0,))
            record = await delivery.result()
        assert [attempt.number for attempt in record.attempts] == [1]


class TestLength:
    async def test_log_keeps_the_first_and_the_newest_attempts(self, client: Client) -> None:
        refused = answer(DeliveryOutcome.RETRY, status=500, error="HTTP_STATUS", reply="x" * 2_048)
        async with workers(client, ScriptedDelivery(refused)):
            delivery = await start_delivery(client, schedule=(0.0,) * 35)
            await failure_of(delivery)
        attempts = (await record_of(delivery)).attempts
        assert len(attempts) == MAX_LOGGED_ATTEMPTS
        assert attempts[0].number == 1
        assert [attempt.number for attempt in attempts[1:]] == list(range(7, 36))

    async def test_long_delivery_continues_as_new_with_its_log_and_its_place_in_the_schedule(self) -> None:
        async with await WorkflowEnvironment.start_local(
            dev_server_existing_path=temporal_binary(),
            dev_server_extra_args=[
                *server_args(),
                "--dynamic-config-value",
                "limit.historyCount.suggestContinueAsNew=40",
            ],
            dev_server_log_level="error",
        ) as short:
            busy = answer(DeliveryOutcome.DEFERRED, error="ENDPOINT_BUSY", retry_after=1.0)
            script = ScriptedDelivery(*[REFUSED] * 6, busy, REFUSED)
            async with workers(short.client, script):
                delivery = await start_delivery(short.client, schedule=(0.0,) * 13)
                await failure_of(delivery)
            first = await short.client.get_workflow_handle(
                delivery.id, run_id=delivery.first_execution_run_id
            ).describe()
            last = short.client.get_workflow_handle(delivery.id, result_type=CallbackRecord)
            record = await record_of(last)
            assert first.status is WorkflowExecutionStatus.CONTINUED_AS_NEW
            assert [attempt.number for attempt in record.attempts] == list(range(1, 14))
            assert record.body == '{"the":"body"}'
            assert {call.webhook_id for call in script.calls} == {record.task_id}
            assert [call.body for call in script.calls].count(None) == 1
            assert status_of(await last.describe()) == "FAILED"


class TestReceivers:
    async def test_event_reaches_a_real_receiver_signed(self, client: Client) -> None:
        async with Receiver() as receiver, courier() as sender, workers(client, sender.delivery):
            record = await (await start_delivery(client, receiver.url)).result()
            request = receiver.requests[0]
            assert request.verify(SECRET)["task_id"] == record.task_id
            assert record.body == request.body.decode()

    async def test_receiver_that_comes_back_after_an_outage_gets_its_event(self, client: Client) -> None:
        async with Receiver() as before:
            port = before.port
        async with courier() as sender, workers(client, sender.delivery):
            delivery = await start_delivery(client, f"http://127.0.0.1:{port}/callbacks", schedule=(0.0, *[0.3] * 20))
            await until(delivery, CallbackStatus.RETRYING, 2)
            async with Receiver(port=port) as receiver:
                record = await delivery.result()
                assert len(receiver.requests) == 1
        assert {attempt.error_code for attempt in record.attempts[:-1]} == {"CONNECT_FAILED"}

    async def test_event_waits_for_a_callback_worker_that_is_down(self, client: Client) -> None:
        async with Receiver() as receiver:
            delivery = await start_delivery(client, receiver.url)
            await asyncio.sleep(0.3)
            assert status_of(await delivery.describe()) == "PENDING"
            async with courier() as sender, workers(client, sender.delivery):
                assert (await delivery.result()).status is CallbackStatus.SUCCEEDED

    @pytest.mark.durability
    async def test_worker_killed_mid_delivery_delivers_all_the_same_under_the_same_id(
        self, temporal: WorkflowEnvironment
    ) -> None:
        client = temporal.client
        async with Receiver() as receiver:
            receiver.script(receivers.hang())
            victim = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.workflows.callback_worker",
                client.service_client.config.target_host,
                cwd=Path(__file__).parents[2],
            )
            try:
                delivery = await start_delivery(client, receiver.url)
                await receiver.wait_for(1, timeout=60)
                os.kill(victim.pid, signal.SIGKILL)
                killed_at = time.monotonic()
                async with courier() as sender, workers(client, sender.delivery):
                    record = await delivery.result()
            finally:
                if victim.returncode is None:
                    victim.kill()
                await victim.wait()
            assert time.monotonic() - killed_at < 20
            assert record.status is CallbackStatus.SUCCEEDED
            assert [request.headers["webhook-id"] for request in receiver.requests] == [record.task_id] * 2
            assert receiver.requests[0].body == receiver.requests[1].body


class CountedDelivery(CallbackActivities):
    """Counts the activity slots that attempts hold."""

    def __init__(self, delivery: CallbackActivities) -> None:
        self._delivery = delivery
        self.held: dict[str, int] = {}
        self.max_held: dict[str, int] = {}

    @activity.defn(name=DELIVER_CALLBACK)
    async def deliver_callback(self, delivery: DeliverCallbackInput) -> DeliveryAttempt:
        url = delivery.url
        self.held[url] = self.held.get(url, 0) + 1
        # Asked in the next turn of the loop: a deferred attempt has left by then, one that waits has not.
        asyncio.get_running_loop().call_soon(self._look, url)
        try:
            return await self._delivery.deliver_callback(delivery)
        finally:
            self.held[url] -= 1

    def _look(self, url: str) -> None:
        self.max_held[url] = max(self.max_held.get(url, 0), self.held[url])


@pytest.mark.timeout(600)
@pytest.mark.soak
@pytest.mark.parametrize("waiting", [max(200, scaled(1_000))])
async def test_dead_endpoint_with_many_waiting_tasks_holds_four_slots_and_delays_nobody(
    client: Client, waiting: int
) -> None:
    async with Receiver() as dead, Receiver() as healthy, courier(total_timeout=1.0) as sender:
        dead.default = receivers.hang()
        counted = CountedDelivery(sender.delivery)
        async with workers(client, counted):
            stuck = []
            for _ in range(waiting // 20):
                stuck += await asyncio.gather(
                    *(start_delivery(client, dead.url, schedule=(0.0, HOUR)) for _ in range(20))
                )
            await dead.wait_for(4)
            delays = []
            for _ in range(20):
                start = time.monotonic()
                await (await start_delivery(client, healthy.url)).result()
                delays.append(time.monotonic() - start)
            await dead.wait_for(5, timeout=60)
            assert counted.max_held[dead.url] <= 4
            assert dead.max_in_flight <= 4
            assert sorted(delays)[18] < 5.0
            for start_at in range(0, waiting, 20):
                await asyncio.gather(*(delivery.terminate() for delivery in stuck[start_at : start_at + 20]))
