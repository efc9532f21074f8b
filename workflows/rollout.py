"""A new version of a GPU pool's workers, from its first share of the tasks to promotion or rollback.

The workflow waits and acts; what was seen and what follows from it comes from activities, so that the rule may be
changed while a rollout runs, without a gate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType
from typing import TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

with workflow.unsafe.imports_passed_through():
    from workflows.canary_rule import Comparison, Tally, Verdict
    from workflows.contracts import RolloutActivities
    from workflows.naming import MEMO_RECORD
    from workflows.rollouts import (
        ENDED_ROLLOUT,
        MAX_DECISIONS,
        BeginRolloutInput,
        Observation,
        ObserveInput,
        RampInput,
        RolloutAction,
        RolloutDecision,
        RolloutInput,
        RolloutPhase,
        RolloutRecord,
        RolloutState,
        SettleInput,
    )

ROLLOUT_OVER = "ROLLOUT_OVER"
"""Type of the error that an update gets when the rollout has been decided."""

_TRY = timedelta(minutes=2)
_HEARTBEAT = timedelta(seconds=30)
# Never given up: a share that was given has to be taken back.
_RETRIES = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=30))

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


@workflow.defn(name="RolloutWorkflow")
class RolloutWorkflow:
    """One canary of one GPU pool.

    Commands: `begin_rollout`, memo; then per look a timer, `observe_rollout`, memo; on pause and resume
    `set_canary_share`, memo; at the end `settle_rollout`, memo. Closes Canceled after a Temporal cancel, which is an
    abort, else Completed. Continues as new between two looks.

    Updates and a cancel set flags, on which `_life` acts between two looks.
    """

    @workflow.init
    def __init__(self, given: RolloutInput) -> None:
        self._given = given
        now = workflow.now()
        self._state = given.state or RolloutState(
            record=RolloutRecord(
                pool=given.pool,
                canary=given.canary,
                phase=RolloutPhase.OBSERVING,
                started_at=now,
                updated_at=now,
                observe_until_seconds=given.observe_seconds,
            ),
            canary=Tally(),
            current=Tally(),
            measured_until=now,
        )
        self._paused = self._state.record.phase is RolloutPhase.PAUSED
        self._ordered: RolloutAction | None = None
        """End that an operator asked for."""

    @workflow.run
    async def run(self, given: RolloutInput) -> RolloutRecord:
        """Roll out; the result is the same record as the memo. `given` is taken by the constructor."""
        life = asyncio.create_task(self._life())
        try:
            return await asyncio.shield(life)
        except asyncio.CancelledError:
            self._ordered = self._ordered or RolloutAction.ABORT
            record = await life
            if record.phase is RolloutPhase.ABORTED:
                raise
            return record

    @workflow.update(name="pause")
    def pause(self) -> None:
        """Give the canary no new tasks and decide nothing until `resume`; idempotent."""
        self._paused = True

    @workflow.update(name="resume")
    def resume(self) -> None:
        """Go on; idempotent."""
        self._paused = False

    @workflow.update(name="abort")
    def abort(self) -> None:
        """Take the share away and end."""
        self._ordered = RolloutAction.ABORT

    @workflow.update(name="decide")
    def decide(self, promote: bool) -> None:
        """Promote or roll back now, whatever the numbers say."""
        self._ordered = RolloutAction.PROMOTE if promote else RolloutAction.ROLL_BACK

    @pause.validator
    @resume.validator
    @abort.validator
    def refuse(self) -> None:
        """Refuse what comes after the decision."""
        if self._is_over() or self._ordered is not None:
            raise ApplicationError(
                f"the rollout of {self._given.canary} is decided",
                type=ROLLOUT_OVER,
                non_retryable=True,
                category=ApplicationErrorCategory.BENIGN,
            )

    @decide.validator
    def refuse_decision(self, promote: bool) -> None:
        """Refuse a second decision; the first may be either."""
        self.refuse()

    async def _life(self) -> RolloutRecord:
        if self._given.state is None:
            await self._begin()
        while not self._is_over():
            if self._is_long():
                await workflow.wait_condition(workflow.all_handlers_finished)
                # A handler may have asked for something just now.
                if not self._is_asked():
                    workflow.continue_as_new(
                        replace(self._given, state=self._state), memo={MEMO_RECORD: self._state.record}
                    )
            await self._wait()
            await self._step()
        await workflow.wait_condition(workflow.all_handlers_finished)
        return self._state.record

    def _is_over(self) -> bool:
        return self._state.record.phase in ENDED_ROLLOUT

    def _is_long(self) -> bool:
        info, limit = workflow.info(), self._given.continue_after_events
        long = info.is_continue_as_new_suggested() or bool(limit and info.get_current_history_length() >= limit)
        # The next run would not be a cancelled one, and would not know what was asked of this one.
        return long and not self._is_asked()

    def _is_asked(self) -> bool:
        return self._ordered is not None or self._paused != (self._state.record.phase is RolloutPhase.PAUSED)

    async def _wait(self) -> None:
        """Until the next look, or until somebody wants something. A pause takes as long as it takes."""
        if self._paused:
            await workflow.wait_condition(self._is_asked)
            return
        with suppress(TimeoutError):
            await workflow.wait_condition(
                self._is_asked, timeout=self._given.look_seconds, timeout_summary="until the next look"
            )

    async def _begin(self) -> None:
        given = self._given
        current = await self._do(
            RolloutActivities.begin_rollout,
            BeginRolloutInput(pool=given.pool, canary=given.canary, percentage=given.percentage),
        )
        self._note(RolloutAction.RAMP, f"{given.percentage:g} % of new tasks", current=current)

    async def _step(self) -> None:
        if self._ordered is not None:
            await self._settle(self._ordered, "by an operator")
        elif self._is_asked():
            await self._pause_or_resume()
        elif not self._paused:
            await self._look()

    async def _pause_or_resume(self) -> None:
        given, paused = self._given, self._paused
        ours = await self._do(
            RolloutActivities.set_canary_share,
            RampInput(
                pool=given.pool,
                canary=given.canary,
                current=self._current(),
                percentage=0.0 if paused else given.percentage,
            ),
        )
        if not ours:
            self._stand_down()
        elif paused:
            self._note(RolloutAction.PAUSE, "by an operator", phase=RolloutPhase.PAUSED)
        else:
            # What ended meanwhile was not watched.
            self._state = replace(self._state, measured_until=workflow.now(), silent_seconds=0.0)
            self._note(RolloutAction.RESUME, "by an operator", phase=RolloutPhase.OBSERVING)

    async def _look(self) -> None:
        given, before = self._given, self._state
        seen = await self._do(
            RolloutActivities.observe_rollout,
            ObserveInput(
                pool=given.pool,
                canary=given.canary,
                current=self._current(),
                since=before.measured_until,
                leave_out_seconds=given.leave_out_seconds,
                overdue_seconds=given.overdue_seconds,
                rule=given.rule,
                canary_before=before.canary,
                current_before=before.current,
            ),
        )
        # Longer than between two looks: the control workers were away, and nobody watched.
        passed = min((workflow.now() - before.record.updated_at).total_seconds(), 2 * given.look_seconds)
        self._state = replace(
            before,
            canary=seen.canary,
            current=seen.current,
            measured_until=seen.measured_until,
            silent_seconds=0.0 if seen.canary_polls else before.silent_seconds + passed,
            record=replace(
                before.record,
                observed_seconds=before.record.observed_seconds + passed,
                comparison=seen.comparison,
            ),
        )
        if self._is_asked():
            self._keep()
            return
        await self._decide(seen, seen.comparison)

    async def _decide(self, seen: Observation, found: Comparison) -> None:
        given, state = self._given, self._state
        record, phase = state.record, state.record.phase
        if not seen.ours:
            self._stand_down()
        elif found.verdict is Verdict.WORSE:
            await self._settle(RolloutAction.ROLL_BACK, found.reason)
        elif state.silent_seconds >= given.overdue_seconds:
            await self._settle(
                RolloutAction.ROLL_BACK, f"no worker of it has asked for work for {state.silent_seconds:.0f} s"
            )
        elif phase is RolloutPhase.ASKING or record.observed_seconds < record.observe_until_seconds:
            self._keep()
        elif found.verdict is Verdict.HOLDS:
            await self._settle(RolloutAction.PROMOTE, found.reason)
        elif state.extensions < given.max_extensions:
            self._state = replace(
                state,
                extensions=state.extensions + 1,
                record=replace(record, observe_until_seconds=record.observe_until_seconds + given.observe_seconds),
            )
            self._note(RolloutAction.EXTEND, found.reason)
        else:
            self._note(RolloutAction.ASK, found.reason, phase=RolloutPhase.ASKING)

    async def _settle(self, action: RolloutAction, reason: str) -> None:
        """Act on an end; somebody else's change of the deployment stays."""
        ours = await self._do(
            RolloutActivities.settle_rollout,
            SettleInput(
                pool=self._given.pool,
                canary=self._given.canary,
                current=self._current(),
                promote=action is RolloutAction.PROMOTE,
            ),
        )
        if ours:
            self._note(action, reason, phase=_ENDS[action])
        else:
            self._stand_down()

    def _stand_down(self) -> None:
        reason = "somebody else has changed the deployment; it stays as it is"
        self._note(RolloutAction.STAND_DOWN, reason, phase=RolloutPhase.SUPERSEDED)

    def _current(self) -> str:
        return self._state.record.current or ""

    def _note(
        self, action: RolloutAction, reason: str, *, phase: RolloutPhase | None = None, current: str | None = None
    ) -> None:
        """Keep a decision with the numbers it rests on."""
        record = self._state.record
        decision = RolloutDecision(
            action=action,
            at=workflow.now(),
            reason=reason,
            observed_seconds=record.observed_seconds,
            comparison=record.comparison,
        )
        decisions = (*record.decisions, decision)
        if len(decisions) > MAX_DECISIONS:
            decisions = (decisions[0], *decisions[-(MAX_DECISIONS - 1) :])
        phase = phase or record.phase
        record = replace(record, decisions=decisions, phase=phase, current=current or record.current)
        takes_tasks = phase in {RolloutPhase.OBSERVING, RolloutPhase.ASKING}
        share = self._given.percentage if takes_tasks else 100.0 if phase is RolloutPhase.PROMOTED else 0.0
        self._state = replace(self._state, record=replace(record, percentage=share))
        workflow.logger.info(
            "rollout_decision",
            extra={"pool": record.pool, "canary": record.canary, "action": action.value, "reason": reason},
        )
        self._keep()

    def _keep(self) -> None:
        """Make the state readable without a worker."""
        self._state = replace(self._state, record=replace(self._state.record, updated_at=workflow.now()))
        workflow.upsert_memo({MEMO_RECORD: self._state.record})

    async def _do(self, act: Callable[[RolloutActivities, _Request], Awaitable[_Answer]], request: _Request) -> _Answer:
        return await workflow.execute_activity_method(
            act, request, start_to_close_timeout=_TRY, heartbeat_timeout=_HEARTBEAT, retry_policy=_RETRIES
        )


_ENDS = MappingProxyType(
    {
        RolloutAction.PROMOTE: RolloutPhase.PROMOTED,
        RolloutAction.ROLL_BACK: RolloutPhase.ROLLED_BACK,
        RolloutAction.ABORT: RolloutPhase.ABORTED,
    }
)
