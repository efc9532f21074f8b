from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temporalio.converter import DataConverter

from workflows.admission_ledger import UNLISTED_AFTER, AdmissionLedger
from workflows.quotas import (
    AdmissionState,
    AdmitRequest,
    Allowance,
    Bucket,
    HeldPlace,
    Refusal,
    RefusalReason,
    RunningTasks,
    StalePlace,
    TierLimits,
    UsedAmount,
    UsedPeriod,
    period_start,
)

NOON = datetime(2026, 9, 2, 12, tzinfo=UTC)
"""A Wednesday."""
DAY = 86_400.0


def fresh() -> AdmissionLedger:
    ledger = AdmissionLedger(AdmissionState(active_at=NOON))
    ledger.adopt(RunningTasks(), NOON)
    return ledger


def request(task_id: str, limits: TierLimits | None = None, **fields: object) -> AdmitRequest:
    base = AdmitRequest(task_id=task_id, claim=f"claim-of-{task_id}", limits=limits or TierLimits())
    return replace(base, **fields)  # type: ignore[arg-type]  # the fields are those of the dataclass


def admit(ledger: AdmissionLedger, asked: AdmitRequest, now: datetime = NOON) -> HeldPlace | RefusalReason:
    refusal = ledger.refusal(asked, now)
    return refusal.reason if refusal else ledger.take(asked, now, tentative=False)


def held(ledger: AdmissionLedger) -> list[str]:
    return [place.task_id for place in ledger.state().places]


def reserving(amount: float, spent: float = 0.0) -> tuple[AdmissionLedger, TierLimits]:
    """A ledger that counts GPU seconds of the day."""
    ledger = fresh()
    ledger.learn_used(UsedAmount(gpu_seconds=spent), DAY, NOON)
    return ledger, TierLimits(max_pending=10, allowance=Allowance(period_seconds=DAY, gpu_seconds=amount))


class TestBucket:
    @settings(deadline=None)
    @given(
        burst=st.integers(1, 5),
        rate=st.sampled_from([6.0, 60.0, 90.0, 600.0]),
        steps=st.lists(st.floats(0, 3), min_size=1, max_size=60),
    )
    def test_any_window_holds_at_most_the_burst_and_what_was_refilled(
        self, burst: int, rate: float, steps: list[float]
    ) -> None:
        ledger, limits = fresh(), TierLimits(max_pending=1_000, burst=burst, rate_per_minute=rate)
        now, accepted = NOON, []
        for number, step in enumerate(steps):
            now += timedelta(seconds=step)
            if isinstance(admit(ledger, request(f"t{number}", limits), now), HeldPlace):
                accepted.append(now)
        for start in range(len(accepted)):
            for end in range(start, len(accepted)):
                window = (accepted[end] - accepted[start]).total_seconds()
                assert end - start + 1 <= burst + window * rate / 60 + 1e-3

    @settings(deadline=None)
    @given(burst=st.integers(1, 6), rate=st.sampled_from([7.0, 60.0, 180.0]))
    def test_asking_again_after_the_named_wait_succeeds_and_not_before(self, burst: int, rate: float) -> None:
        ledger, limits = fresh(), TierLimits(max_pending=1_000, burst=burst, rate_per_minute=rate)
        for number in range(burst):
            assert isinstance(admit(ledger, request(f"t{number}", limits)), HeldPlace)
        refusal = ledger.refusal(request("next", limits), NOON)
        assert refusal is not None
        assert refusal.reason is RefusalReason.RATE_LIMITED
        due = NOON + timedelta(seconds=refusal.retry_after_seconds)
        assert ledger.refusal(request("next", limits), due - timedelta(milliseconds=5)) is not None
        assert ledger.refusal(request("next", limits), due + timedelta(microseconds=1)) is None

    def test_a_clock_that_steps_back_gives_no_tokens(self) -> None:
        ledger, limits = fresh(), TierLimits(max_pending=9, burst=1)
        admit(ledger, request("a", limits))
        assert admit(ledger, request("b", limits), NOON - timedelta(hours=1)) is RefusalReason.RATE_LIMITED
        assert admit(ledger, request("b", limits), NOON + timedelta(seconds=0.9)) is RefusalReason.RATE_LIMITED

    def test_a_smaller_burst_holds_from_the_next_request_on(self) -> None:
        ledger = fresh()
        admit(ledger, request("a", TierLimits(max_pending=9, burst=20)))
        narrow = TierLimits(max_pending=9, burst=1)
        assert isinstance(admit(ledger, request("b", narrow)), HeldPlace)
        assert admit(ledger, request("c", narrow)) is RefusalReason.RATE_LIMITED

    def test_full_at_names_the_end_of_the_refill(self) -> None:
        bucket = Bucket(tokens=1.0, touched_at=NOON, rate_per_minute=60.0, burst=4)
        assert bucket.full_at() == NOON + timedelta(seconds=3)
        assert bucket.at(bucket.full_at()) == 4.0


class TestPlaces:
    @settings(deadline=None)
    @given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["admit", "release", "withdraw"]))))
    def test_never_more_than_the_limit_and_a_refusal_changes_nothing(self, moves: list[tuple[str, str]]) -> None:
        ledger, limits = fresh(), TierLimits(max_pending=2, burst=1_000)
        expected: dict[str, str] = {}
        for number, (task_id, move) in enumerate(moves):
            claim = f"{task_id}-{number}"
            if move == "admit":
                before = ledger.state()
                outcome = admit(ledger, request(task_id, limits, claim=claim))
                if isinstance(outcome, RefusalReason):
                    assert outcome is RefusalReason.TOO_MANY_PENDING_TASKS
                    assert len(expected) == 2
                    assert task_id not in expected
                    assert ledger.state() == before
                else:
                    assert outcome.token == expected.setdefault(task_id, claim)
            elif task_id in expected and move == "release":
                ledger.release(task_id, expected.pop(task_id), 0.0, NOON)
            elif task_id in expected:
                place = next(place for place in ledger.state().places if place.task_id == task_id)
                for each in place.claims:
                    ledger.withdraw(task_id, each, NOON)
                del expected[task_id]
            assert {place.task_id: place.token for place in ledger.state().places} == expected

    def test_the_same_task_again_pays_no_token(self) -> None:
        ledger, limits = fresh(), TierLimits(burst=2)
        first = admit(ledger, request("a", limits))
        again = admit(ledger, request("a", limits, claim="other"))
        assert isinstance(first, HeldPlace)
        assert isinstance(again, HeldPlace)
        assert again.token == first.token
        assert ledger.usage(NOON).tokens == 1.0

    def test_a_release_under_another_token_frees_nothing(self) -> None:
        ledger = fresh()
        admit(ledger, request("a"))
        ledger.release("a", "not-it", 1.0, NOON)
        assert held(ledger) == ["a"]

    def test_a_place_shared_by_two_submissions_stays_until_both_withdraw(self) -> None:
        ledger = fresh()
        admit(ledger, request("a", claim="one"))
        admit(ledger, request("a", claim="two"))
        ledger.withdraw("a", "one", NOON)
        assert held(ledger) == ["a"]
        ledger.withdraw("a", "two", NOON)
        assert held(ledger) == []

    def test_a_withdrawal_gives_the_token_back(self) -> None:
        ledger, limits = fresh(), TierLimits(burst=1)
        admit(ledger, request("a", limits))
        ledger.withdraw("a", "claim-of-a", NOON)
        assert isinstance(admit(ledger, request("b", limits)), HeldPlace)

    def test_an_admit_that_was_withdrawn_before_it_came_gets_nothing(self) -> None:
        ledger = fresh()
        ledger.withdraw("a", "claim-of-a", NOON)
        carried = AdmissionLedger(ledger.state())
        assert admit(carried, request("a")) is RefusalReason.WITHDRAWN
        assert isinstance(admit(carried, request("a", claim="a new submission")), HeldPlace)

    @pytest.mark.parametrize("ran", [True, False])
    def test_a_stale_place_is_dropped_only_under_its_own_token(self, *, ran: bool) -> None:
        ledger, limits = fresh(), TierLimits(max_pending=1)
        admit(ledger, request("a", limits))
        wrong = StalePlace(task_id="a", token="older", ran=ran)
        right = StalePlace(task_id="a", token="claim-of-a", ran=ran)
        assert admit(ledger, request("b", limits, stale=(wrong,))) is RefusalReason.TOO_MANY_PENDING_TASKS
        assert isinstance(admit(ledger, request("b", limits, stale=(right,))), HeldPlace)
        assert held(ledger) == ["b"]


class TestListing:
    def test_tentative_places_over_the_limit_are_refused_in_the_order_they_came(self) -> None:
        ledger, limits = AdmissionLedger(AdmissionState(active_at=NOON)), TierLimits(max_pending=3)
        for task_id in "abc":
            ledger.take(request(task_id, limits), NOON, tentative=True)
        running = HeldPlace(task_id="old", token="k", admitted_at=NOON - timedelta(hours=2), claims=("k",))
        ledger.adopt(RunningTasks(places=(running,)), NOON)
        outcomes = [ledger.confirm(request(task_id, limits), NOON) for task_id in "abc"]
        assert [isinstance(outcome, Refusal) for outcome in outcomes] == [False, False, True]
        assert held(ledger) == ["old", "a", "b"]
        assert ledger.usage(NOON).tokens == limits.burst - 2

    def test_a_task_that_turns_out_to_run_keeps_its_own_token_and_costs_none(self) -> None:
        ledger, limits = AdmissionLedger(AdmissionState(active_at=NOON)), TierLimits(max_pending=1)
        ledger.take(request("a", limits), NOON, tentative=True)
        running = [
            HeldPlace(task_id=task_id, token=f"k-{task_id}", admitted_at=NOON, claims=(f"k-{task_id}",))
            for task_id in ("z", "a")
        ]
        ledger.adopt(RunningTasks(places=tuple(running)), NOON)
        place = ledger.confirm(request("a", limits), NOON)
        assert isinstance(place, HeldPlace)
        assert place.token == "k-a"
        assert ledger.usage(NOON).tokens == limits.burst

    def test_what_ended_while_it_was_listed_holds_no_place_and_counts_once(self) -> None:
        ledger = AdmissionLedger(AdmissionState(active_at=NOON))
        running = RunningTasks(places=(HeldPlace(task_id="a", token="k", admitted_at=NOON, claims=("k",)),))
        ledger.release("a", "k", 5.0, NOON)
        ledger.release("b", "k", 7.0, NOON)
        ledger.learn_used(UsedAmount(tasks=3, gpu_seconds=30.0, recent=("b",)), DAY, NOON)
        ledger.adopt(running, NOON)
        usage = ledger.usage(NOON)
        assert (usage.held, usage.used_tasks, usage.used_gpu_seconds) == ((), 4, 35.0)

    def test_counting_again_drops_old_places_without_a_run_and_keeps_young_ones(self) -> None:
        ledger = fresh()
        admit(ledger, request("leaked"))
        later = NOON + UNLISTED_AFTER
        admit(ledger, request("young"), later)
        ledger.adopt(RunningTasks(), later)
        assert held(ledger) == ["young"]


class TestAllowance:
    def test_unfinished_tasks_count_before_they_end(self) -> None:
        ledger = fresh()
        ledger.learn_used(UsedAmount(tasks=1), DAY, NOON)
        limits = TierLimits(max_pending=10, allowance=Allowance(period_seconds=DAY, tasks=3))
        for task_id in "ab":
            assert isinstance(admit(ledger, request(task_id, limits)), HeldPlace)
        refusal = ledger.refusal(request("c", limits), NOON)
        assert refusal is not None
        assert (refusal.reason, refusal.retry_after_seconds) == (RefusalReason.QUOTA_EXHAUSTED, DAY / 2)
        ledger.release("a", "claim-of-a", 1.0, NOON)
        assert admit(ledger, request("c", limits)) is RefusalReason.QUOTA_EXHAUSTED

    def test_a_task_that_never_ran_uses_nothing(self) -> None:
        ledger, limits = fresh(), TierLimits(allowance=Allowance(period_seconds=DAY, tasks=1))
        ledger.learn_used(UsedAmount(), DAY, NOON)
        admit(ledger, request("a", limits))
        never = StalePlace(task_id="a", token="claim-of-a", ran=False)
        assert isinstance(admit(ledger, request("b", limits, stale=(never,))), HeldPlace)

    def test_estimates_are_reserved_and_replaced_by_what_was_used(self) -> None:
        ledger, limits = reserving(100.0)
        assert isinstance(admit(ledger, request("a", limits, estimated_gpu_seconds=60.0)), HeldPlace)
        assert admit(ledger, request("b", limits, estimated_gpu_seconds=60.0)) is RefusalReason.QUOTA_EXHAUSTED
        ledger.release("a", "claim-of-a", 10.0, NOON)
        assert isinstance(admit(ledger, request("b", limits, estimated_gpu_seconds=60.0)), HeldPlace)

    def test_without_an_estimate_it_ends_when_it_is_used_up(self) -> None:
        ledger, limits = reserving(100.0, spent=99.9)
        assert isinstance(admit(ledger, request("a", limits)), HeldPlace)
        ledger.release("a", "claim-of-a", 20.0, NOON)
        assert admit(ledger, request("b", limits)) is RefusalReason.QUOTA_EXHAUSTED

    def test_the_next_period_starts_empty(self) -> None:
        ledger, limits = reserving(100.0, spent=100.0)
        midnight = datetime(2026, 9, 3, tzinfo=UTC)
        assert admit(ledger, request("a", limits), midnight - timedelta(microseconds=1)) is (
            RefusalReason.QUOTA_EXHAUSTED
        )
        assert isinstance(admit(ledger, request("a", limits), midnight), HeldPlace)
        assert ledger.usage(midnight).period_started_at == midnight

    def test_another_period_has_to_be_counted_first(self) -> None:
        ledger, _ = reserving(100.0)
        assert ledger.knows_used(Allowance(period_seconds=DAY, tasks=1))
        assert not ledger.knows_used(Allowance(period_seconds=7 * DAY, tasks=1))

    def test_a_reset_forgets_what_was_used_and_what_ended_before_it(self) -> None:
        ledger, limits = reserving(100.0, spent=100.0)
        admit(ledger, request("a", TierLimits(max_pending=10, burst=1)))
        ledger.reset(NOON)
        assert held(ledger) == ["a"]
        assert isinstance(admit(ledger, request("b", limits)), HeldPlace)
        assert ledger.counted_since(DAY, NOON + timedelta(hours=1)) == NOON

    def test_periods_start_at_midnight_and_weeks_on_monday(self) -> None:
        assert period_start(DAY, NOON) == datetime(2026, 9, 2, tzinfo=UTC)
        assert period_start(7 * DAY, NOON) == datetime(2026, 8, 31, tzinfo=UTC)


class TestClosing:
    def test_it_stays_until_idle_refilled_and_the_used_period_is_over(self) -> None:
        idle = timedelta(hours=1)
        ledger = fresh()
        assert ledger.closable_at(idle) == NOON + idle
        admit(ledger, request("a", TierLimits(burst=200, rate_per_minute=0.5)))
        assert ledger.closable_at(idle) == NOON + idle
        slow = fresh()
        for task_id in "abc":
            admit(slow, request(task_id, TierLimits(burst=200, rate_per_minute=0.02)))
        assert slow.closable_at(idle) == NOON + timedelta(minutes=150)
        used, _ = reserving(100.0, spent=1.0)
        assert used.closable_at(idle) == datetime(2026, 9, 3, tzinfo=UTC)


def test_the_state_survives_the_payload_converter() -> None:
    state = AdmissionState(
        active_at=NOON,
        places=(HeldPlace(task_id="a", token="k", admitted_at=NOON, claims=("k", "l")),),
        bucket=Bucket(tokens=1.5, touched_at=NOON, rate_per_minute=60.0, burst=20),
        used=UsedPeriod(started_at=NOON, seconds=DAY, tasks=2, gpu_seconds=1.5),
        reset_at=NOON,
        withdrawn=("x",),
    )
    converter = DataConverter.default.payload_converter
    assert converter.from_payload(converter.to_payload(AdmissionLedger(state).state()), AdmissionState) == state
