"""Whether a new version of a GPU worker is worse than the current one: counts in, a verdict out. Pure arithmetic.

The unit is a task on a version: a task that failed three times on one version is one failure, not three, since its
attempts are no independent trials. Two questions are asked of every pair of counts: is the canary *significantly*
worse and by more than what is tolerated (then it goes), and is what was *measured* within what is tolerated on a
large enough sample (then it may stay). In between, more has to be seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from workflows.failures import FailureCode

MIN_DELAYS: Final = 20
"""Canary tasks from which on its delay is compared, or `min_tasks` if that is less: with fewer the normal
approximation promises too much."""
MIN_DELAYS_PER_MODEL: Final = 5
"""Models with fewer tasks on either version are left out of the comparison of delays."""

_F = FailureCode
NOT_THE_WORKERS_FAULT: Final = frozenset(
    {
        _F.VALIDATION_FAILED,
        _F.SAFETY_REJECTED,
        _F.INPUT_GONE,
        _F.UPSTREAM_RATE_LIMITED,
        _F.WORKER_SHUTDOWN,
        _F.QUEUE_TIMEOUT,
        _F.CANCELED,
        _F.TERMINATED,
    }
)
"""Ends of an attempt that say nothing about the version that ran it. All others count against it."""


@dataclass(frozen=True, kw_only=True)
class CanaryRule:
    """What is tolerated, and how sure one must be."""

    max_error_difference: float = 0.001
    """Failed tasks of the canary above those of the current version, as a share: 0.1 points."""
    max_delay_difference: float = 0.05
    """How much longer an attempt may take, as a share."""
    min_tasks: int = 200
    """Tasks on each version before the canary may be promoted."""
    significance: float = 0.0005
    """Chance, per look and question, of sending a canary back that is no worse. There are hundreds of looks."""


@dataclass(frozen=True, kw_only=True)
class DelaySums:
    """Durations of successful attempts with one model, as sums over the natural logarithms of their seconds.

    Logarithms, because durations are skewed and a ratio is asked for; a model that had to be loaded first weighs
    little. Sums, because they add up over looks and stay small.
    """

    tasks: int = 0
    log_sum: float = 0.0
    log_squares: float = 0.0

    def plus(self, other: DelaySums) -> DelaySums:
        """Both together."""
        return DelaySums(
            tasks=self.tasks + other.tasks,
            log_sum=self.log_sum + other.log_sum,
            log_squares=self.log_squares + other.log_squares,
        )

    def mean(self) -> float:
        """Mean logarithm."""
        return self.log_sum / self.tasks

    def mean_variance(self) -> float:
        """Estimated variance of the mean; needs two tasks."""
        spread = max(0.0, self.log_squares - self.log_sum**2 / self.tasks)
        return spread / (self.tasks - 1) / self.tasks


def one_delay(seconds: float) -> DelaySums:
    """One successful attempt."""
    log = math.log(max(seconds, 0.001))
    return DelaySums(tasks=1, log_sum=log, log_squares=log * log)


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What was seen of one version."""

    tasks: int = 0
    """Ended tasks of which at least one attempt on this version succeeded or failed by its fault."""
    failed: int = 0
    """Of them, those with an attempt that failed by its fault."""
    overdue: int = 0
    """Open tasks that this version has had for too long, at the latest look."""
    delays: dict[str, DelaySums] = field(default_factory=dict)
    """By model."""

    def plus(self, later: Tally) -> Tally:
        """This and what was seen afterwards; of overdue tasks the latest count stays."""
        models = {**self.delays, **later.delays}
        return Tally(
            tasks=self.tasks + later.tasks,
            failed=self.failed + later.failed,
            overdue=later.overdue,
            delays={m: self.delays.get(m, DelaySums()).plus(later.delays.get(m, DelaySums())) for m in models},
        )


class Verdict(StrEnum):
    """What the counts say about the canary."""

    WORSE = "worse"
    """Significantly, and by more than is tolerated."""
    HOLDS = "holds"
    """Enough was seen, and it is within what is tolerated."""
    TOO_FEW = "too_few"
    """Not enough was seen."""
    DIFFERS = "differs"
    """Enough was seen, it is outside of what is tolerated, but may be chance."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A verdict with every number that it rests on. Differences are canary less current."""

    verdict: Verdict
    reason: str
    canary_tasks: int
    current_tasks: int
    canary_failed: int
    current_failed: int
    canary_overdue: int
    current_overdue: int
    error_difference: float | None = None
    """Difference of the shares of failed tasks; None before both have a task."""
    error_p: float = 1.0
    """Chance of so many failures on a canary that is no worse (exact test, one-sided)."""
    overdue_p: float = 1.0
    """The same for overdue tasks."""
    delay_difference: float | None = None
    """Relative difference of the durations; None with too few."""
    delay_p: float = 1.0
    """Chance of such a delay on a canary that is no slower."""


def compare(canary: Tally, current: Tally, rule: CanaryRule) -> Comparison:
    """Judge the canary against the current version."""
    errors = _share(canary.failed, canary.tasks, current.failed, current.tasks)
    error_p = chance_of_more(canary.failed, canary.tasks, current.failed, current.tasks)
    # What an overdue task will come to is not known yet: it stands beside the ended ones, not among the failed.
    seen, seen_now = canary.tasks + canary.overdue, current.tasks + current.overdue
    overdue_p = chance_of_more(canary.overdue, seen, current.overdue, seen_now)
    overdue = _share(canary.overdue, seen, current.overdue, seen_now)
    delay, delay_p = delay_difference(canary.delays, current.delays, least=min(MIN_DELAYS, rule.min_tasks))

    def over(difference: float | None, limit: float) -> bool:
        return difference is not None and difference >= limit

    questions = (
        ("error rate", over(errors, rule.max_error_difference), error_p),
        ("overdue tasks", over(overdue, rule.max_error_difference), overdue_p),
        ("delay", over(delay, rule.max_delay_difference), delay_p),
    )
    worse = [name for name, outside, p in questions if outside and p < rule.significance]
    outside = [name for name, is_outside, _ in questions if is_outside]
    fewest = min(canary.tasks, current.tasks)
    if worse:
        verdict, reason = Verdict.WORSE, f"significantly worse: {', '.join(worse)}"
    elif fewest < rule.min_tasks:
        verdict, reason = Verdict.TOO_FEW, f"{fewest} of {rule.min_tasks} tasks"
    elif delay is None:
        verdict, reason = Verdict.TOO_FEW, "too few durations of the same models"
    elif outside:
        verdict, reason = Verdict.DIFFERS, f"outside of what is tolerated: {', '.join(outside)}"
    else:
        verdict, reason = Verdict.HOLDS, "within what is tolerated"
    return Comparison(
        verdict=verdict,
        reason=reason,
        canary_tasks=canary.tasks,
        current_tasks=current.tasks,
        canary_failed=canary.failed,
        current_failed=current.failed,
        canary_overdue=canary.overdue,
        current_overdue=current.overdue,
        error_difference=errors,
        error_p=error_p,
        overdue_p=overdue_p,
        delay_difference=delay,
        delay_p=delay_p,
    )


def _share(part: int, whole: int, other_part: int, other_whole: int) -> float | None:
    return part / whole - other_part / other_whole if whole and other_whole else None


def chance_of_more(failed: int, tasks: int, other_failed: int, other_tasks: int) -> float:
    """One-sided exact test of Fisher: the chance of at least `failed` of all failures among `tasks`, were it chance.

    1.0 where nothing can be said: no failures, or one side without tasks.
    """
    total, failures = tasks + other_tasks, failed + other_failed
    if failed == 0 or other_tasks == 0:
        return 1.0
    log_all = _log_choose(total, failures)

    def chance(count: int) -> float:
        return math.exp(_log_choose(tasks, count) + _log_choose(other_tasks, failures - count) - log_all)

    least = max(failed, failures - other_tasks)
    return min(1.0, math.fsum(chance(count) for count in range(least, min(tasks, failures) + 1)))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def delay_difference(
    canary: Mapping[str, DelaySums], current: Mapping[str, DelaySums], *, least: int = MIN_DELAYS
) -> tuple[float | None, float]:
    """How much longer attempts take, as a share, and the chance of that on a canary that is no slower.

    Compared model by model, since a mix that differs by chance is no slowness, and weighted by precision.
    (None, 1.0) with fewer than `least` durations of the canary.
    """
    weights = weighted = 0.0
    tasks = 0
    for model in sorted(canary.keys() & current.keys()):
        new, old = canary[model], current[model]
        if min(new.tasks, old.tasks) < MIN_DELAYS_PER_MODEL:
            continue
        # A floor: clocks tick, and equal durations are no certainty.
        weight = 1.0 / max(new.mean_variance() + old.mean_variance(), 1e-8)
        weights += weight
        weighted += weight * (new.mean() - old.mean())
        tasks += new.tasks
    if tasks < least or not weights:
        return None, 1.0
    log_ratio = weighted / weights
    p = 0.5 * math.erfc(log_ratio * math.sqrt(weights) / math.sqrt(2.0))
    return math.expm1(log_ratio), p
