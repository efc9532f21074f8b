"""The rule of a canary: every verdict, and the statistics behind them against what is known of them."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scale import scaled
from workflows.canary_rule import (
    MIN_DELAYS,
    NOT_THE_WORKERS_FAULT,
    CanaryRule,
    DelaySums,
    Tally,
    Verdict,
    chance_of_more,
    compare,
    delay_difference,
    one_delay,
)
from workflows.failures import FailureCode

RULE = CanaryRule()


def delays(tasks: int, seconds: float, *, spread: float = 0.1, model: str = "wan") -> dict[str, DelaySums]:
    """Durations evenly spread around `seconds`."""
    found = DelaySums()
    for number in range(tasks):
        share = (2 * number / max(1, tasks - 1)) - 1
        found = found.plus(one_delay(seconds * math.exp(spread * share)))
    return {model: found} if tasks else {}


def tally(tasks: int, failed: int = 0, *, seconds: float = 60.0, overdue: int = 0) -> Tally:
    return Tally(tasks=tasks, failed=failed, overdue=overdue, delays=delays(tasks - failed, seconds))


class TestVerdicts:
    @pytest.mark.parametrize(
        ("canary", "current", "verdict", "reason"),
        [
            (tally(0), tally(0), Verdict.TOO_FEW, "0 of 200 tasks"),
            (tally(199), tally(4_000), Verdict.TOO_FEW, "199 of 200 tasks"),
            (tally(4_000), tally(199), Verdict.TOO_FEW, "199 of 200 tasks"),
            (tally(200), tally(4_000), Verdict.HOLDS, "within what is tolerated"),
            (tally(200), tally(4_000, 40), Verdict.HOLDS, "within what is tolerated"),
            (tally(200, seconds=62.9), tally(4_000), Verdict.HOLDS, "within what is tolerated"),
            # One failure of 200 is 0.5 points: more than 0.1, and it may be chance.
            (tally(200, 1), tally(4_000, 4), Verdict.DIFFERS, "outside of what is tolerated: error rate"),
            (tally(1_001, 2), tally(10_000, 10), Verdict.HOLDS, "within what is tolerated"),
            (tally(1_000, 2), tally(10_000, 10), Verdict.DIFFERS, "outside of what is tolerated: error rate"),
            # A few failures of a few tasks are enough where the current version has none.
            (tally(6, 6), tally(120), Verdict.WORSE, "significantly worse: error rate"),
            (tally(2, 2), tally(40), Verdict.TOO_FEW, "2 of 200 tasks"),
            # Where everything fails, the canary is not the reason.
            (tally(6, 6), tally(120, 118), Verdict.TOO_FEW, "6 of 200 tasks"),
            (tally(200, seconds=70.0), tally(4_000), Verdict.WORSE, "significantly worse: delay"),
            (tally(0, overdue=5), tally(100), Verdict.WORSE, "significantly worse: overdue tasks"),
            (tally(0, overdue=5), tally(20, overdue=80), Verdict.TOO_FEW, "0 of 200 tasks"),
        ],
    )
    def test_counts_give_a_verdict_and_its_reason(
        self, canary: Tally, current: Tally, verdict: Verdict, reason: str
    ) -> None:
        found = compare(canary, current, RULE)
        assert (found.verdict, found.reason) == (verdict, reason)

    def test_a_significant_difference_within_what_is_tolerated_is_no_reason_to_roll_back(self) -> None:
        slower = compare(tally(2_000, seconds=61.2), tally(20_000), RULE)
        assert slower.delay_p < RULE.significance
        assert slower.verdict is Verdict.HOLDS
        failing = compare(
            Tally(tasks=20_000, failed=17, delays=delays(100, 60)),
            Tally(tasks=200_000, failed=10, delays=delays(100, 60)),
            RULE,
        )
        assert failing.error_p < RULE.significance
        assert failing.verdict is Verdict.HOLDS

    def test_enough_tasks_without_comparable_durations_are_too_few(self) -> None:
        found = compare(Tally(tasks=500), tally(500), RULE)
        assert (found.verdict, found.reason) == (Verdict.TOO_FEW, "too few durations of the same models")

    def test_every_number_is_in_the_comparison(self) -> None:
        found = compare(tally(400, 4, overdue=1, seconds=66.0), tally(8_000, 40, overdue=2), RULE)
        assert (found.canary_tasks, found.canary_failed, found.canary_overdue) == (400, 4, 1)
        assert (found.current_tasks, found.current_failed, found.current_overdue) == (8_000, 40, 2)
        assert found.error_difference == pytest.approx(0.005)
        assert found.delay_difference == pytest.approx(0.1, abs=1e-3)
        assert 0 < found.error_p < 1
        assert found.delay_p < 1e-6

    def test_every_failure_code_is_the_workers_fault_or_not(self) -> None:
        blamed = set(FailureCode) - NOT_THE_WORKERS_FAULT
        assert blamed == {
            FailureCode.OUT_OF_MEMORY,
            FailureCode.DRIVER_FAULT,
            FailureCode.INFERENCE_FAILED,
            FailureCode.INVALID_OUTPUT,
            FailureCode.MODEL_NOT_LOADABLE,
            FailureCode.ARTIFACT_TOO_LARGE,
            FailureCode.PAYLOAD_TOO_LARGE,
            FailureCode.STORAGE_UNAVAILABLE,
            FailureCode.PHASE_TIMEOUT,
            FailureCode.PROCESSING_TIMEOUT,
            FailureCode.WORKER_LOST,
            FailureCode.WORKER_NOT_READY,
            FailureCode.DEADLINE_EXCEEDED,
            FailureCode.INTERNAL,
        }


class TestTheExactTest:
    def test_it_is_the_hypergeometric_tail_for_every_small_table(self) -> None:
        for tasks, other in itertools.product(range(7), range(1, 9)):
            for failed, other_failed in itertools.product(range(tasks + 1), range(other + 1)):
                failures = failed + other_failed
                ways = sum(
                    math.comb(tasks, k) * math.comb(other, failures - k)
                    for k in range(failed, min(tasks, failures) + 1)
                    if failures - k <= other
                )
                exact = Fraction(ways, math.comb(tasks + other, failures))
                found = chance_of_more(failed, tasks, other_failed, other)
                assert found == pytest.approx(float(exact), rel=1e-9), (failed, tasks, other_failed, other)

    @given(
        tasks=st.integers(1, 3_000),
        other=st.integers(1, 60_000),
        share=st.floats(0, 1),
        other_share=st.floats(0, 1),
    )
    def test_it_is_a_chance_and_grows_less_with_each_failure(
        self, tasks: int, other: int, share: float, other_share: float
    ) -> None:
        failed, other_failed = int(share * tasks), int(other_share * other)
        found = chance_of_more(failed, tasks, other_failed, other)
        assert 0 <= found <= 1
        if failed < tasks:
            # The same failures in all, one more of them on the canary.
            if other_failed:
                assert chance_of_more(failed + 1, tasks, other_failed - 1, other) <= found * (1 + 1e-6)
        else:
            assert found == chance_of_more(tasks, tasks, other_failed, other)

    def test_without_failures_or_without_the_other_side_it_says_nothing(self) -> None:
        assert chance_of_more(0, 100, 5, 100) == 1.0
        assert chance_of_more(5, 100, 0, 0) == 1.0
        assert chance_of_more(0, 0, 0, 0) == 1.0


class TestDelays:
    def test_a_mix_of_models_that_differs_by_chance_is_no_delay(self) -> None:
        canary = {**delays(40, 10, model="small"), **delays(160, 300, model="large")}
        current = {**delays(3_000, 10, model="small"), **delays(1_000, 300, model="large")}
        difference, p = delay_difference(canary, current)
        assert difference == pytest.approx(0.0, abs=0.01)
        assert p > 0.1

    def test_a_model_that_only_one_of_them_ran_is_left_out(self) -> None:
        canary = {**delays(50, 60), **delays(50, 900, model="other")}
        assert delay_difference(canary, delays(500, 60)) == delay_difference(delays(50, 60), delays(500, 60))

    def test_too_few_durations_say_nothing(self) -> None:
        assert delay_difference(delays(MIN_DELAYS - 1, 60), delays(500, 10)) == (None, 1.0)
        assert delay_difference({}, {}) == (None, 1.0)
        many_models = {f"m{n}": delays(4, 60)["wan"] for n in range(50)}
        assert delay_difference(many_models, many_models) == (None, 1.0)

    def test_equal_durations_are_judged_without_a_division_by_zero(self) -> None:
        same = delays(50, 60, spread=0.0)
        assert delay_difference(same, same)[0] == pytest.approx(0.0)
        difference, p = delay_difference(delays(50, 66, spread=0.0), same)
        assert difference == pytest.approx(0.1)
        assert p < 1e-9

    def test_a_model_that_had_to_be_loaded_first_weighs_little(self) -> None:
        canary = delays(199, 60)["wan"].plus(one_delay(660))
        difference, _ = delay_difference({"wan": canary}, delays(4_000, 60))
        assert difference is not None
        assert difference < 0.02

    @given(
        seconds=st.lists(st.floats(0.1, 1_000), min_size=40, max_size=80),
        factor=st.floats(0.5, 2.0),
    )
    def test_the_difference_is_the_factor_between_them(self, seconds: list[float], factor: float) -> None:
        def sums(scale: float) -> dict[str, DelaySums]:
            total = DelaySums()
            for value in seconds:
                total = total.plus(one_delay(value * scale))
            return {"wan": total}

        difference, p = delay_difference(sums(factor), sums(1.0))
        assert difference == pytest.approx(factor - 1, rel=1e-6, abs=1e-6)
        assert 0 <= p <= 1
        assert (p < 0.5) == (factor > 1) or factor == pytest.approx(1.0)

    @given(st.lists(st.lists(st.floats(0.01, 1_000), max_size=5), max_size=6))
    def test_tallies_add_up_whatever_the_looks(self, looks: list[list[float]]) -> None:
        total = Tally()
        for number, look in enumerate(looks):
            delays_seen = DelaySums()
            for value in look:
                delays_seen = delays_seen.plus(one_delay(value))
            total = total.plus(
                Tally(tasks=len(look), failed=0, overdue=number, delays={"wan": delays_seen} if look else {})
            )
        values = [value for look in looks for value in look]
        assert total.tasks == len(values)
        assert total.overdue == max(0, len(looks) - 1)
        if values:
            assert total.delays["wan"].log_sum == pytest.approx(math.fsum(map(math.log, values)), abs=1e-6)


def some_tasks(chance: random.Random, tasks: int, *, error: float, seconds: float) -> Tally:
    """Tasks as they come: some fail, the others take about `seconds`."""
    logs = [math.log(seconds) + chance.gauss(0, 0.1) for _ in range(tasks) if chance.random() >= error]
    sums = DelaySums(tasks=len(logs), log_sum=sum(logs), log_squares=sum(log * log for log in logs))
    return Tally(tasks=tasks, failed=tasks - len(logs), delays={"wan": sums})


def look_by_look(chance: random.Random, *, error: float, slower: float) -> Verdict:
    """Last verdict of a rollout of 480 canary tasks of 9,600, looked at 240 times as the workflow does."""
    canary, current = Tally(), Tally()
    verdict = Verdict.TOO_FEW
    for _ in range(240):
        canary = canary.plus(some_tasks(chance, 2, error=error, seconds=60 * slower))
        current = current.plus(some_tasks(chance, 38, error=0.01, seconds=60))
        verdict = compare(canary, current, RULE).verdict
        if verdict is Verdict.WORSE:
            break
    return verdict


@pytest.mark.soak
def test_over_all_looks_of_a_rollout_a_good_canary_stays_and_a_bad_one_goes() -> None:
    chance, count = random.Random(11), scaled(200)
    good = [look_by_look(chance, error=0.01, slower=1.0) for _ in range(count)]
    assert good.count(Verdict.WORSE) <= 0.03 * count + 1
    for error, slower in ((0.08, 1.0), (0.01, 1.15)):
        bad = [look_by_look(chance, error=error, slower=slower) for _ in range(count // 4)]
        assert set(bad) == {Verdict.WORSE}
