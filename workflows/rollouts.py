"""What crosses the boundaries of a rollout: its input, its record, and what its activities take and give."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final

from workflows.canary_rule import CanaryRule, Comparison, Tally

MAX_DECISIONS: Final = 100
"""Decisions kept in the record: the first one and the latest."""


class RolloutPhase(StrEnum):
    """Where a rollout is. The last four are its ends."""

    OBSERVING = "OBSERVING"
    PAUSED = "PAUSED"
    """By an operator: the canary gets no new tasks, and nothing is decided."""
    ASKING = "ASKING"
    """The time is over and the rule does not hold: an operator has to decide. A worse canary still goes by itself."""
    PROMOTED = "PROMOTED"
    ROLLED_BACK = "ROLLED_BACK"
    ABORTED = "ABORTED"
    SUPERSEDED = "SUPERSEDED"
    """Somebody else changed the deployment; it was left as they set it."""


ENDED_ROLLOUT: Final = frozenset(
    {RolloutPhase.PROMOTED, RolloutPhase.ROLLED_BACK, RolloutPhase.ABORTED, RolloutPhase.SUPERSEDED}
)


class RolloutAction(StrEnum):
    """What was decided."""

    RAMP = "ramp"
    EXTEND = "extend"
    ASK = "ask"
    PAUSE = "pause"
    RESUME = "resume"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"
    ABORT = "abort"
    STAND_DOWN = "stand_down"
    """Leave the deployment to whoever changed it."""


@dataclass(frozen=True, kw_only=True)
class RolloutDecision:
    """One decision and what it rests on."""

    action: RolloutAction
    at: datetime
    reason: str
    observed_seconds: float
    """How long the canary had been observed, pauses left out."""
    comparison: Comparison | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """Memo `record` and result of a rollout."""

    pool: str
    canary: str
    """Build id of the new version."""
    phase: RolloutPhase
    started_at: datetime
    updated_at: datetime
    current: str | None = None
    """Build id that it is compared with; None before the ramp."""
    percentage: float = 0.0
    """Share of new tasks that the canary gets now."""
    observed_seconds: float = 0.0
    observe_until_seconds: float = 0.0
    """When that is reached, the rollout is decided or extended."""
    comparison: Comparison | None = None
    """The latest."""
    decisions: tuple[RolloutDecision, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RolloutState:
    """What a rollout carries over continue-as-new."""

    record: RolloutRecord
    canary: Tally
    current: Tally
    measured_until: datetime
    extensions: int = 0
    silent_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RolloutInput:
    """Input of `RolloutWorkflow`. Every duration is an input, so that a rollout can also take seconds."""

    pool: str
    canary: str
    percentage: float = 5.0
    observe_seconds: float = 4 * 3600.0
    max_extensions: int = 1
    """Each is another `observe_seconds`; then an operator is asked."""
    look_seconds: float = 60.0
    leave_out_seconds: float = 60.0
    """What ended this recently is looked at next time: visibility lags behind."""
    overdue_seconds: float = 300.0
    """An attempt that runs longer, or a task that has failed and not ended for longer, is overdue."""
    rule: CanaryRule = field(default_factory=CanaryRule)
    continue_after_events: int | None = None
    """Continue as new from so many events on; None: when the server suggests it."""
    state: RolloutState | None = None
    """Set by continue-as-new."""


@dataclass(frozen=True, kw_only=True)
class BeginRolloutInput:
    """Give the canary its share."""

    pool: str
    canary: str
    percentage: float


@dataclass(frozen=True, kw_only=True)
class RampInput:
    """Change the share of a canary."""

    pool: str
    canary: str
    current: str
    percentage: float


@dataclass(frozen=True, kw_only=True)
class SettleInput:
    """End a rollout: make the canary the current version, or take its share away."""

    pool: str
    canary: str
    current: str
    promote: bool


@dataclass(frozen=True, kw_only=True)
class ObserveInput:
    """One look."""

    pool: str
    canary: str
    current: str
    since: datetime
    """Where the look before ended."""
    leave_out_seconds: float
    overdue_seconds: float
    rule: CanaryRule
    canary_before: Tally
    """What the looks before have seen."""
    current_before: Tally


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one look has seen, added to the looks before, and the verdict."""

    canary: Tally
    current: Tally
    measured_until: datetime
    comparison: Comparison
    canary_polls: bool
    """Whether any worker of the canary asks for work or has ended a task since the look before."""
    ours: bool = True
    """Whether the deployment is still as this rollout set it."""
