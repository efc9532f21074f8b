"""One delivery attempt against a receiver that behaves well or badly."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from hashlib import sha256
from itertools import pairwise

import pytest
from standardwebhooks.webhooks import WebhookVerificationError

from activities.callback_body import MAX_BODY_BYTES, MAX_MERGED_BYTES, callback_body
from activities.egress_policy import EgressPolicy
from activities.endpoint_gate import BreakerRule, Endpoint, EndpointGate, Permit, Refusal, Shares
from tests import receiver as receivers
from tests.activities.couriers import LINKS, OLD_SECRET, SECRET, Tenants, courier, event
from tests.certificates import CertificateAuthority
from tests.receiver import Receiver, respond
from workers.keys import EndpointSettings
from workflows.failures import FailureCode
from workflows.states import TaskStatus
from workflows.tasks import DeliveryOutcome


class TestRequest:
    async def test_body_headers_and_signature_are_those_of_the_event(self) -> None:
        async with Receiver() as receiver, courier() as sender:
            attempt = await sender.deliver(receiver.url)
            request = receiver.requests[0]
            assert attempt.outcome is DeliveryOutcome.DELIVERED
            assert attempt.status_code == 200
            assert attempt.reply == "ok"
            assert attempt.body == request.body.decode()
            assert request.verify(SECRET) == {
                "type": "task.succeeded",
                "timestamp": "2026-01-31T12:02:00.123Z",
                "task_id": "task1",
                "status": "SUCCEEDED",
                "result_url": LINKS.video_url("task1", event().artifact_expires_at or datetime.now(UTC)),
                "poster_url": LINKS.poster_url("task1", event().artifact_expires_at or datetime.now(UTC)),
                "error_code": None,
                "error_message": None,
                "created_at": "2026-01-31T12:00:00.123Z",
                "started_at": "2026-01-31T12:01:00.123Z",
                "finished_at": "2026-01-31T12:02:00.123Z",
                "labels": ["first"],
            }
            assert request.method == "POST"
            assert request.headers["webhook-id"] == request.headers["idempotency-key"] == "task1"
            assert abs(int(request.headers["webhook-timestamp"]) - time.time()) < 5
            assert request.headers["content-type"] == "application/json"
            assert request.headers["user-agent"] == "reelgate/1.2.3"

    async def test_task_without_a_clip_has_no_links(self) -> None:
        failed = event(
            type="task.failed",
            status=TaskStatus.FAILED,
            artifact_expires_at=None,
            error_code=FailureCode.OUT_OF_MEMORY,
            error_message="too large",
        )
        async with Receiver() as receiver, courier() as sender:
            await sender.deliver(receiver.url, event=failed)
            body = receiver.requests[0].json()
            assert body["result_url"] is None
            assert body["poster_url"] is None
            assert body["error_code"] == "OUT_OF_MEMORY"

    @pytest.mark.parametrize("label", ["Grüße 🎬 видео", "\u2028", '"\\', "\ud800 lone", "日本語" * 50])
    async def test_text_of_any_script_verifies_with_the_official_library(self, label: str) -> None:
        async with Receiver() as receiver, courier() as sender:
            await sender.deliver(receiver.url, event=event(labels=(label,)))
            labels = receiver.requests[0].verify(SECRET)["labels"]
            assert labels == [label.replace("\ud800", "?")]

    async def test_each_live_secret_signs_and_no_other(self) -> None:
        async with Receiver() as receiver, courier(tenants=Tenants([SECRET, OLD_SECRET])) as sender:
            await sender.deliver(receiver.url)
            for secret in (SECRET, OLD_SECRET):
                receiver.requests[0].verify(secret)
            with pytest.raises(WebhookVerificationError):
                receiver.requests[0].verify("whsec_" + "Q0ND" * 8)

    @pytest.mark.parametrize("secrets", [[], ["whsec_"], ["whsec_?"]])
    async def test_nothing_leaves_unsigned(self, secrets: list[str]) -> None:
        async with Receiver() as receiver, courier(tenants=Tenants(secrets)) as sender:
            attempt = await sender.deliver(receiver.url)
            assert (attempt.outcome, attempt.error_code) == (DeliveryOutcome.RETRY, "NOT_SIGNABLE")
            assert receiver.connections == 0

    async def test_retry_sends_the_bytes_of_the_first_attempt(self) -> None:
        async with Receiver() as receiver, courier() as sender:
            receiver.script(respond(503))
            first = await sender.deliver(receiver.url)
            again = await sender.deliver(receiver.url, number=2, body=first.body, event=event(labels=("changed",)))
            assert receiver.requests[0].body == receiver.requests[1].body
            assert receiver.requests[0].headers["webhook-id"] == receiver.requests[1].headers["webhook-id"]
            assert again.body is None

    async def test_https_receiver_with_the_right_certificate_is_served(self) -> None:
        authority = CertificateAuthority()
        async with (
            Receiver(tls=authority.server_context("hooks.test"), host="hooks.test") as receiver,
            courier(names={"hooks.test": "127.0.0.1"}, context=authority.client_context()) as sender,
        ):
            assert (await sender.deliver(receiver.url)).outcome is DeliveryOutcome.DELIVERED
            receiver.requests[0].verify(SECRET)


class TestBody:
    def test_long_error_message_is_cut_first(self) -> None:
        body = callback_body(event(error_message="ü" * 50_000, labels=("kept",)), LINKS)
        assert len(body.encode()) <= MAX_BODY_BYTES
        parsed = json.loads(body)
        assert parsed["error_message"].startswith("üüü")
        assert parsed["error_message"].endswith("…")
        assert parsed["labels"] == ["kept"]
        assert len(body.encode()) > MAX_BODY_BYTES * 0.85

    @pytest.mark.parametrize("message", ['"' * 30_000, "\x00" * 30_000, "🎬" * 30_000, None])
    def test_no_content_makes_a_body_too_large(self, message: str | None) -> None:
        body = callback_body(event(error_message=message, labels=("ü" * 3_000,) * 16), LINKS)
        assert len(body.encode()) <= MAX_BODY_BYTES
        assert json.loads(body)["task_id"] == "task1"

    def test_body_is_compact(self) -> None:
        body = callback_body(event(), LINKS)
        assert body == json.dumps(json.loads(body), ensure_ascii=False, separators=(",", ":"))


class TestOutcome:
    @pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
    async def test_every_2xx_is_success(self, status: int) -> None:
        async with Receiver() as receiver, courier() as sender:
            receiver.default = raw_status(status)
            assert (await sender.deliver(receiver.url)).outcome is DeliveryOutcome.DELIVERED

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 429, 500, 502, 503])
    async def test_refusing_status_is_retried(self, status: int) -> None:
        async with Receiver() as receiver, courier() as sender:
            receiver.default = respond(status, "why not")
            attempt = await sender.deliver(receiver.url)
            assert (attempt.outcome, attempt.error_code) == (DeliveryOutcome.RETRY, "HTTP_STATUS")
            assert (attempt.status_code, attempt.reply) == (status, "why not")

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    async def test_redirect_is_a_failed_attempt_and_not_followed(self, status: int) -> None:
        async with Receiver() as receiver, courier() as sender:
            receiver.default = receivers.redirect(receiver.url_of("/elsewhere"), status)
            attempt = await sender.deliver(receiver.url)
            assert (attempt.outcome, attempt.error_code) == (DeliveryOutcome.RETRY, "REDIRECT")
            assert [request.path for request in receiver.requests] == ["/callbacks"]

    @pytest.mark.parametrize(
        ("behaviour", "code"),
        [
            (respond(410), "GONE"),
            (respond(403, headers={"webhook-delivery": "disable"}), "RECEIVER_DISABLED"),
            (respond(500, headers={"Webhook-Delivery": " Abort-Message "}), "RECEIVER_ABORTED"),
        ],
    )
    async def test_receiver_ends_the_delivery(self, behaviour: receivers.Behaviour, code: str) -> None:
        async with Receiver() as receiver, courier() as sender:
            receiver.default = behaviour
            attempt = await sender.deliver(receiver.url)
            assert (attempt.outcome, attempt.error_code) == (DeliveryOutcome.GIVE_UP, code)

    async def test_accepted_delivery_stays_accepted_whatever_the_receiver_adds(self) -> None:
        async with Receiver() as receiver, courier() as sender:
            receiver.default = respond(200, headers={"webhook-delivery": "disable"})
            assert (await sender.deliver(receiver.url)).outcome is DeliveryOutcome.DELIVERED

    @pytest.mark.parametrize(
        ("behaviour", "code"),
        [
            (receivers.close(), "CONNECTION_LOST"),
            (receivers.reset(), "CONNECTION_LOST"),
            (receivers.hang(), "TIMEOUT"),
            (receivers.drip_headers(), "TIMEOUT"),
            (receivers.flood_headers(), "PROTOCOL_ERROR"),
        ],
        ids=["close", "reset", "hang", "drip", "flood"],
    )
    async def test_receiver_that_does_not_answer_is_retried(self, behaviour: receivers.Behaviour, code: str) -> None:
        async with Receiver() as receiver, courier(total_timeout=0.4) as sender:
            receiver.default = behaviour
            start = time.monotonic()
            attempt = await sender.deliver(receiver.url)
            assert (attempt.outcome, attempt.error_code) == (DeliveryOutcome.RETRY, code)
            assert time.monotonic() - start < 1.5

    @pytest.mark.parametrize(("status", "expected"), [(200, DeliveryOutcome.DELIVERED), (500, DeliveryOutcome.RETRY)])
    @pytest.mark.parametrize("body", ["drip", "endless", "bomb"])
    async def test_status_decides_however_the_body_goes_on(
        self, status: int, expected: DeliveryOutcome, body: str
    ) -> None:
        behaviours = {"drip": receivers.drip, "endless": receivers.endless, "bomb": receivers.gzip_bomb}
        async with Receiver() as receiver, courier(total_timeout=0.4) as sender:
            receiver.default = behaviours[body](status)
            attempt = await sender.deliver(receiver.url)
            assert (attempt.outcome, attempt.status_code) == (expected, status)
            assert len((attempt.reply or "").encode()) <= 2_048

    async def test_unreachable_receivers_are_told_apart(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
            closed = f"http://127.0.0.1:{taken.getsockname()[1]}/"
            async with courier(names={"inside.example": "10.0.0.1"}) as sender:
                expected = {
                    closed: "CONNECT_FAILED",
                    "https://unknown.example/": "NAME_NOT_FOUND",
                    "https://inside.example/": "ADDRESS_REFUSED",
                }
                for url, code in expected.items():
                    attempt = await sender.deliver(url)
                    assert (attempt.outcome, attempt.error_code) == (DeliveryOutcome.RETRY, code)

    async def test_untrusted_certificate_fails_before_anything_is_sent(self) -> None:
        tls = CertificateAuthority().server_context("hooks.test")
        async with (
            Receiver(tls=tls, host="hooks.test") as receiver,
            courier(names={"hooks.test": "127.0.0.1"}) as sender,
        ):
            attempt = await sender.deliver(receiver.url)
            assert (attempt.outcome, attempt.error_code) == (DeliveryOutcome.RETRY, "TLS_FAILED")
            assert receiver.requests == []

    async def test_url_that_is_no_longer_allowed_is_given_up(self) -> None:
        async with Receiver() as receiver, courier(policy=EgressPolicy()) as sender:
            attempt = await sender.deliver(receiver.url)
            assert (attempt.outcome, attempt.error_code) == (DeliveryOutcome.GIVE_UP, "URL_REFUSED")
            assert receiver.connections == 0

    @pytest.mark.parametrize(
        ("value", "seconds"),
        [
            ("0", None),
            ("120", 120),
            ("86400", 86_400),
            ("999999", 86_400),
            ("9" * 6_000, 86_400),
            ("-5", None),
            ("1.5", None),
            ("soon", None),
            ("", None),
            (timedelta(hours=1), 3_600),
            (timedelta(days=9), 86_400),
            (-timedelta(hours=1), None),
        ],
        ids=lambda value: str(value)[:12],
    )
    async def test_retry_after_is_read(self, value: str | timedelta, seconds: float | None) -> None:
        if isinstance(value, timedelta):
            value = format_datetime(datetime.now(UTC) + value, usegmt=True)
        async with Receiver() as receiver, courier() as sender:
            receiver.default = respond(503, headers={"retry-after": value})
            asked = (await sender.deliver(receiver.url)).retry_after_seconds
            assert asked == (None if seconds is None else pytest.approx(seconds, abs=30))

    async def test_reply_is_kept_as_two_kilobytes_of_text_at_most(self) -> None:
        async with Receiver() as receiver, courier() as sender:
            receiver.script(respond(500, b"\xff\x00" * 5_000), respond(500, "ü" * 5_000), respond(500, b""))
            for _ in range(2):
                reply = (await sender.deliver(receiver.url)).reply
                assert reply is not None
                assert 1_000 < len(reply.encode()) <= 2_048
                assert "\x00" not in reply
            assert (await sender.deliver(receiver.url)).reply is None


class TestGate:
    async def test_fifth_attempt_at_a_time_is_deferred_at_once_and_others_go_through(self) -> None:
        async with Receiver() as receiver, courier() as sender:
            receiver.paths["/slow"] = respond(after=0.5)
            slow = [asyncio.create_task(sender.deliver(receiver.url_of("/slow"), f"t{n}")) for n in range(4)]
            await receiver.wait_for(4)
            start = time.monotonic()
            fifth = await sender.deliver(receiver.url_of("/slow"), "t5")
            other = await sender.deliver(receiver.url_of("/other"), "t6")
            other_tenant = asyncio.create_task(sender.deliver(receiver.url_of("/slow"), "t7", tenant="globex"))
            assert time.monotonic() - start < 0.3
            assert (fifth.outcome, fifth.error_code) == (DeliveryOutcome.DEFERRED, "ENDPOINT_BUSY")
            assert fifth.retry_after_seconds == 1
            assert other.outcome is DeliveryOutcome.DELIVERED
            assert (await other_tenant).outcome is DeliveryOutcome.DELIVERED
            assert {attempt.outcome for attempt in await asyncio.gather(*slow)} == {DeliveryOutcome.DELIVERED}
            assert (await sender.deliver(receiver.url_of("/slow"), "t5")).outcome is DeliveryOutcome.DELIVERED

    async def test_busy_endpoint_is_asked_again_after_one_second_doubling_to_five_minutes(self) -> None:
        async with Receiver() as receiver, courier() as sender:
            receiver.default = receivers.hang()
            held = [asyncio.create_task(sender.deliver(receiver.url, f"t{n}")) for n in range(4)]
            await receiver.wait_for(4)
            waits = [
                (await sender.deliver(receiver.url, deferrals=n)).retry_after_seconds for n in (0, 1, 2, 5, 9, 5_000)
            ]
            assert waits == [1, 2, 4, 32, 300, 300]
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)

    async def test_cancelled_attempt_gives_its_place_back(self) -> None:
        async with Receiver() as receiver, courier() as sender:
            receiver.script(*[receivers.hang()] * 4)
            held = [asyncio.create_task(sender.deliver(receiver.url, f"t{n}")) for n in range(4)]
            await receiver.wait_for(4)
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            assert (await sender.deliver(receiver.url)).outcome is DeliveryOutcome.DELIVERED

    async def test_dead_endpoint_is_left_alone_until_one_probe_finds_it_back(self) -> None:
        rule = BreakerRule(failures=3, open_seconds=0.3, max_open_seconds=1.0)
        async with Receiver() as receiver, courier(breaker=rule) as sender:
            receiver.script(*[respond(500)] * 3)
            for _ in range(3):
                await sender.deliver(receiver.url)
            refused = await sender.deliver(receiver.url)
            assert (refused.outcome, refused.error_code) == (DeliveryOutcome.DEFERRED, "BREAKER_OPEN")
            assert (refused.retry_after_seconds or 0) >= 0.3
            assert len(receiver.requests) == 3
            await asyncio.sleep(0.35)
            receiver.default = respond(after=0.1)
            outcomes = [attempt.outcome for attempt in await sender.deliver_all(receiver.url, 10)]
            assert outcomes.count(DeliveryOutcome.DELIVERED) == 1
            assert outcomes.count(DeliveryOutcome.DEFERRED) == 9
            assert (await sender.deliver(receiver.url)).outcome is DeliveryOutcome.DELIVERED

    async def test_answer_of_a_living_receiver_does_not_open_the_breaker(self) -> None:
        async with Receiver() as receiver, courier(breaker=BreakerRule(failures=2)) as sender:
            receiver.default = respond(410)
            for _ in range(5):
                assert (await sender.deliver(receiver.url)).outcome is DeliveryOutcome.GIVE_UP


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def endpoint(number: int = 0, tenant: str = "acme", origin: str = "https://a.example") -> Endpoint:
    return Endpoint(tenant=tenant, url=f"{origin}/{number}", origin=origin)


def enter(gate: EndpointGate, where: Endpoint, concurrency: int = 4) -> Permit:
    permit = gate.enter(where, concurrency)
    assert isinstance(permit, Permit)
    return permit


def fail(gate: EndpointGate, where: Endpoint, times: int = 1) -> None:
    for _ in range(times):
        with enter(gate, where) as permit:
            permit.alive = False


class TestEndpointGate:
    def test_open_time_doubles_with_each_failed_probe_up_to_its_limit(self) -> None:
        clock = Clock()
        gate = EndpointGate(clock=clock)
        fail(gate, endpoint(), 5)
        for lasts in (30, 60, 120, 240, 300, 300):
            refusal = gate.refusal(endpoint())
            assert refusal is not None
            assert refusal.retry_in == lasts
            clock.now += lasts - 1
            refusal = gate.refusal(endpoint())
            assert refusal is not None
            assert refusal.retry_in == 30
            clock.now += 1
            fail(gate, endpoint())

    def test_success_between_failures_keeps_the_breaker_shut(self) -> None:
        gate = EndpointGate()
        for _ in range(3):
            fail(gate, endpoint(), 4)
            with enter(gate, endpoint()) as permit:
                permit.alive = True
        assert gate.refusal(endpoint()) is None
        assert gate.size == 0

    def test_requests_under_way_when_it_opened_do_not_open_it_twice(self) -> None:
        clock = Clock()
        gate = EndpointGate(clock=clock, breaker=BreakerRule(failures=1))
        permits = [enter(gate, endpoint()) for _ in range(4)]
        for permit in permits:
            with permit:
                permit.alive = False
        refusal = gate.refusal(endpoint())
        assert refusal is not None
        assert refusal.retry_in == 30

    def test_those_sent_away_come_again_one_after_the_other(self) -> None:
        gate = EndpointGate(clock=Clock(), breaker=BreakerRule(returns_per_second=10))
        fail(gate, endpoint(), 5)
        refusals = [gate.refusal(endpoint()) for _ in range(1_000)]
        turns = [refusal.retry_in for refusal in refusals if refusal is not None and refusal.retry_in is not None]
        assert turns[0] == 30
        assert turns[999] == pytest.approx(30 + 999 / 10)
        assert max(later - earlier for earlier, later in pairwise(turns)) == pytest.approx(0.1)

    def test_the_longest_line_comes_again_within_the_longest_open_time(self) -> None:
        gate = EndpointGate(clock=Clock())
        fail(gate, endpoint(), 5)
        refusals = [gate.refusal(endpoint()) for _ in range(10_000)]
        assert max(refusal.retry_in or 0.0 for refusal in refusals if refusal is not None) == 300

    def test_probe_that_learnt_nothing_leaves_the_next_one_its_turn(self) -> None:
        clock = Clock()
        gate = EndpointGate(clock=clock)
        fail(gate, endpoint(), 5)
        clock.now += 30
        with enter(gate, endpoint()):
            assert isinstance(gate.enter(endpoint(), 4), Refusal)
        with enter(gate, endpoint()) as permit:
            permit.alive = True
        assert gate.refusal(endpoint()) is None

    def test_url_per_task_does_not_escape_the_share_of_its_origin(self) -> None:
        gate = EndpointGate(shares=Shares(per_origin=5, per_tenant=8))
        held = [enter(gate, endpoint(number)) for number in range(5)]
        assert isinstance(gate.enter(endpoint(6), 4), Refusal)
        held += [enter(gate, endpoint(number, origin=f"https://{number}.example")) for number in range(3)]
        assert isinstance(gate.enter(endpoint(0, origin="https://c.example"), 4), Refusal)
        enter(gate, endpoint(0, tenant="globex"))
        held[0].__exit__(None, None, None)
        enter(gate, endpoint(6))

    def test_table_of_failing_endpoints_is_bounded(self) -> None:
        gate = EndpointGate(max_endpoints=10)
        busy = enter(gate, endpoint(0))
        for number in range(1, 50):
            fail(gate, endpoint(number))
        assert gate.size == 10
        with busy:
            busy.alive = True
        assert gate.size == 9


def merging(url: str, *, window_ms: int = 100, max_tasks: int = 100, concurrency: int | None = None) -> Tenants:
    settings = EndpointSettings(merge_window_ms=window_ms, merge_max_tasks=max_tasks, concurrency=concurrency)
    return Tenants(endpoints={url: settings})


class TestMerging:
    async def test_tasks_that_meet_leave_as_one_request_and_each_has_its_own_outcome(self) -> None:
        async with Receiver() as receiver, courier(tenants=merging(receiver.url)) as sender:
            attempts = await sender.deliver_all(receiver.url, 10)
            assert len(receiver.requests) == 1
            body = receiver.requests[0].verify(SECRET)
            assert body["type"] == "tasks.completed"
            assert isinstance(body["tasks"], list)
            assert [task["task_id"] for task in body["tasks"]] == [f"task{n}" for n in range(10)]
            expected_id = "m" + sha256("\n".join(sorted(f"task{n}" for n in range(10))).encode()).hexdigest()
            headers = receiver.requests[0].headers
            assert headers["webhook-id"] == headers["idempotency-key"] == expected_id
            for number, attempt in enumerate(attempts):
                assert (attempt.outcome, attempt.webhook_id) == (DeliveryOutcome.DELIVERED, expected_id)
                assert json.loads(attempt.body or "") == body["tasks"][number]

    async def test_lone_task_goes_as_it_would_without_merging(self) -> None:
        async with Receiver() as receiver, courier(tenants=merging(receiver.url)) as sender:
            attempt = await sender.deliver(receiver.url)
            assert receiver.requests[0].json()["type"] == "task.succeeded"
            assert receiver.requests[0].headers["webhook-id"] == "task1"
            assert attempt.webhook_id is None

    async def test_thousand_tasks_that_meet_take_eleven_requests_at_most(self) -> None:
        async with Receiver() as receiver, courier(tenants=merging(receiver.url, window_ms=500)) as sender:
            attempts = await sender.deliver_all(receiver.url, 1_000)
            assert {attempt.outcome for attempt in attempts} == {DeliveryOutcome.DELIVERED}
            assert len(receiver.requests) <= 11
            assert receiver.max_in_flight <= 4

    async def test_merged_request_stays_under_its_size(self) -> None:
        async with Receiver() as receiver, courier(tenants=merging(receiver.url)) as sender:
            large = event(error_message="x" * 30_000)
            attempts = await asyncio.gather(
                *(sender.deliver(receiver.url, event=replace(large, task_id=f"task{n}")) for n in range(30))
            )
            assert {attempt.outcome for attempt in attempts} == {DeliveryOutcome.DELIVERED}
            assert len(receiver.requests) == 3
            assert max(len(request.body) for request in receiver.requests) <= MAX_MERGED_BYTES

    async def test_refused_merged_request_is_retried_by_each_task(self) -> None:
        async with Receiver() as receiver, courier(tenants=merging(receiver.url)) as sender:
            receiver.default = respond(503, headers={"retry-after": "60"})
            for attempt in await sender.deliver_all(receiver.url, 3):
                assert (attempt.outcome, attempt.status_code) == (DeliveryOutcome.RETRY, 503)
                assert attempt.retry_after_seconds == 60

    async def test_task_cancelled_in_the_window_is_not_sent(self) -> None:
        async with Receiver() as receiver, courier(tenants=merging(receiver.url, window_ms=200)) as sender:
            tasks = [asyncio.create_task(sender.deliver(receiver.url, f"task{n}")) for n in range(3)]
            await asyncio.sleep(0.05)
            tasks[0].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            merged = receiver.requests[0].json()["tasks"]
            assert isinstance(merged, list)
            assert [task["task_id"] for task in merged] == ["task1", "task2"]

    async def test_place_of_a_cancelled_task_in_the_window_goes_to_another(self) -> None:
        async with Receiver() as receiver:
            async with courier(tenants=merging(receiver.url, window_ms=300, max_tasks=2)) as sender:
                gone = asyncio.create_task(sender.deliver(receiver.url, "gone"))
                await asyncio.sleep(0.05)
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
                await sender.deliver_all(receiver.url, 2)
            assert len(receiver.requests) == 1

    async def test_busy_endpoint_holds_a_merge_window_for_one_more_and_then_defers_it(self) -> None:
        async with Receiver() as receiver:
            tenants = merging(receiver.url, window_ms=150, concurrency=1)
            async with courier(tenants=tenants, total_timeout=1.0) as sender:
                receiver.script(receivers.hang())
                first = asyncio.create_task(sender.deliver(receiver.url, "first"))
                await receiver.wait_for(1)
                start = time.monotonic()
                attempts = await sender.deliver_all(receiver.url, 5)
                assert {attempt.error_code for attempt in attempts} == {"ENDPOINT_BUSY"}
                assert time.monotonic() - start < 0.8
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)

    async def test_open_breaker_refuses_before_a_window_is_opened(self) -> None:
        async with Receiver() as receiver:
            tenants = merging(receiver.url, window_ms=2_000)
            async with courier(tenants=tenants, breaker=BreakerRule(failures=1)) as sender:
                receiver.default = respond(500)
                await sender.deliver(receiver.url, event=event(type="callback.test"))  # alone, and at once
                start = time.monotonic()
                assert (await sender.deliver(receiver.url)).error_code == "BREAKER_OPEN"
                assert time.monotonic() - start < 0.5

    async def test_event_that_is_no_task_goes_alone(self) -> None:
        async with Receiver() as receiver, courier(tenants=merging(receiver.url)) as sender:
            await asyncio.gather(
                *(sender.deliver(receiver.url, f"task{n}", event=event(type="callback.test")) for n in range(3))
            )
            assert len(receiver.requests) == 3

    async def test_closing_sends_what_a_window_has_collected(self) -> None:
        async with Receiver() as receiver, courier(tenants=merging(receiver.url, window_ms=2_000)) as sender:
            waiting = [asyncio.create_task(sender.deliver(receiver.url, f"task{n}")) for n in range(3)]
            await asyncio.sleep(0.05)
            start = time.monotonic()
            await sender.delivery.aclose()
            assert {attempt.outcome for attempt in await asyncio.gather(*waiting)} == {DeliveryOutcome.DELIVERED}
            assert time.monotonic() - start < 1.0
            assert len(receiver.requests) == 1


def raw_status(status: int) -> receivers.Behaviour:
    """Any status, known to the library or not, without a body."""

    async def behave(exchange: receivers.Exchange) -> None:
        await exchange.write(f"HTTP/1.1 {status} Whatever\r\ncontent-length: 0\r\n\r\n".encode())
        exchange.reusable = True

    return behave
