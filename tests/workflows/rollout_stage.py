"""A rollout on a real server whose observations follow a script; the deployment is played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from uuid import uuid4

from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from workflows.canary_rule import Comparison, Tally, Verdict
from workflows.contracts import (
    BEGIN_ROLLOUT,
    OBSERVE_ROLLOUT,
    SET_CANARY_SHARE,
    SETTLE_ROLLOUT,
    RolloutActivities,
)
from workflows.naming import CONTROL_QUEUE, MEMO_RECORD, rollout_id
from workflows.rollout import RolloutWorkflow
from workflows.rollouts import (
    BeginRolloutInput,
    Observation,
    ObserveInput,
    RampInput,
    RolloutInput,
    RolloutPhase,
    RolloutRecord,
    SettleInput,
)

RolloutHandle = WorkflowHandle[RolloutWorkflow, RolloutRecord]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one look sees; the last of a script is repeated."""

    verdict: Verdict
    polls: bool = True
    ours: bool = True


HOLDS = Seen(verdict=Verdict.HOLDS)
WORSE = Seen(verdict=Verdict.WORSE)
TOO_FEW = Seen(verdict=Verdict.TOO_FEW)


def comparison(verdict: Verdict) -> Comparison:
    return Comparison(
        verdict=verdict,
        reason=f"scripted: {verdict}",
        canary_tasks=1,
        current_tasks=2,
        canary_failed=0,
        current_failed=0,
        canary_overdue=0,
        current_overdue=0,
    )


class PlayedDeployment(RolloutActivities):
    """One deployment with a current version `old`."""

    def __init__(self, *looks: Seen) -> None:
        self.looks = list(looks)
        self.current = "old"
        self.ramping: str | None = None
        self.percentage = 0.0
        self.observed: list[ObserveInput] = []
        self.shares: list[float] = []
        self.refuses = False
        self.may_look = asyncio.Event()
        self.may_look.set()
        self.may_settle = asyncio.Event()
        self.may_settle.set()

    @activity.defn(name=BEGIN_ROLLOUT)
    async def begin_rollout(self, request: BeginRolloutInput) -> str:
        if self.refuses:
            raise ApplicationError("no such version", type="ROLLOUT_REFUSED", non_retryable=True)
        self.ramping, self.percentage = request.canary, request.percentage
        return self.current

    @activity.defn(name=SET_CANARY_SHARE)
    async def set_canary_share(self, request: RampInput) -> bool:
        self.shares.append(request.percentage)
        self.percentage = request.percentage
        return self.current == request.current

    @activity.defn(name=OBSERVE_ROLLOUT)
    async def observe_rollout(self, request: ObserveInput) -> Observation:
        seen = self.looks[min(len(self.observed), len(self.looks) - 1)]
        self.observed.append(request)
        await self.may_look.wait()
        return Observation(
            canary=request.canary_before.plus(Tally(tasks=1)),
            current=request.current_before.plus(Tally(tasks=2)),
            measured_until=datetime.now(UTC),
            comparison=comparison(seen.verdict),
            canary_polls=seen.polls,
            ours=seen.ours,
        )

    @activity.defn(name=SETTLE_ROLLOUT)
    async def settle_rollout(self, request: SettleInput) -> bool:
        await self.may_settle.wait()
        if self.current != request.current:
            return False
        if request.promote:
            self.current = request.canary
        self.ramping, self.percentage = None, 0.0
        return True


QUICK = RolloutInput(
    pool="", canary="new", observe_seconds=0.3, max_extensions=1, look_seconds=0.1, overdue_seconds=60.0
)
PATIENT = replace(QUICK, observe_seconds=3600.0)
"""Nothing is decided by the clock."""


@dataclass
class RolloutStage:
    """A control worker that plays."""

    client: Client
    deployment: PlayedDeployment
    pool: str = field(default_factory=lambda: f"pool-{uuid4().hex[:8]}")

    async def start(self, given: RolloutInput) -> RolloutHandle:
        """Start a rollout of the stage's pool."""
        return await self.client.start_workflow(
            RolloutWorkflow.run, replace(given, pool=self.pool), id=rollout_id(self.pool), task_queue=CONTROL_QUEUE
        )

    async def record(self) -> RolloutRecord | None:
        """The memo, as any reader sees it."""
        described = await self.client.get_workflow_handle(rollout_id(self.pool)).describe()
        record: RolloutRecord | None = await described.memo_value(MEMO_RECORD, None, type_hint=RolloutRecord)
        return record

    async def until(self, phase: RolloutPhase, *, looks: int = 0) -> RolloutRecord:
        """Wait for a phase and for looks."""
        async with asyncio.timeout(30):
            while True:
                record = await self.record()
                if record is not None and record.phase is phase and len(self.deployment.observed) >= looks:
                    return record
                await asyncio.sleep(0.02)


@asynccontextmanager
async def rollout_stage(client: Client, *looks: Seen) -> AsyncIterator[RolloutStage]:
    """Run a control worker whose looks see this, one after the other."""
    deployment = PlayedDeployment(*looks)
    async with Worker(
        client,
        task_queue=CONTROL_QUEUE,
        workflows=[RolloutWorkflow],
        activities=[
            deployment.begin_rollout,
            deployment.set_canary_share,
            deployment.observe_rollout,
            deployment.settle_rollout,
        ],
    ):
        yield RolloutStage(client=client, deployment=deployment)
