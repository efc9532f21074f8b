"""Starting, steering and reading rollouts, in bounded time. Reading needs no worker, steering a control worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import FailureError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from workflows.naming import CONTROL_QUEUE, MEMO_RECORD, rollout_id
from workflows.rollout import RolloutWorkflow
from workflows.rollouts import RolloutInput, RolloutRecord

CALL_LIMIT: Final = timedelta(seconds=10)
BEGIN_LIMIT: Final = timedelta(seconds=15)
"""How long a started rollout is waited for until it has given the canary its share."""
_PAUSE_SECONDS: Final = 0.2
_NO_WORKER: Final = "no control worker has answered; is one running?"


class RolloutError(Exception):
    """A rollout cannot be started, steered or read; the message says why."""


class NoRolloutError(RolloutError):
    """The pool has had no rollout within the retention."""


@dataclass(frozen=True, kw_only=True)
class RolloutReading:
    """A rollout as it is."""

    open: bool
    run_status: str
    """Temporal's own, e.g. TERMINATED: then nobody has taken the share away."""
    record: RolloutRecord | None
    """None before it has begun."""


class Rollouts:
    """The rollouts of a namespace; one at a time per pool."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def start(self, given: RolloutInput) -> RolloutRecord:
        """Start a rollout and wait until the canary has its share.

        Raises:
            RolloutError: one is running already, it could not begin, or nobody took it up.
        """
        try:
            async with asyncio.timeout(CALL_LIMIT.total_seconds()):
                handle = await self._client.start_workflow(
                    RolloutWorkflow.run,
                    given,
                    id=rollout_id(given.pool),
                    task_queue=CONTROL_QUEUE,
                    id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                    id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                    static_summary=f"Rolls {given.canary} out in pool {given.pool}",
                )
        except WorkflowAlreadyStartedError:
            raise RolloutError(f"pool {given.pool} has a rollout that is not over; abort it first") from None
        except TimeoutError:
            raise RolloutError("Temporal did not answer in time") from None
        try:
            async with asyncio.timeout(BEGIN_LIMIT.total_seconds()):
                while True:
                    reading = await self._read(handle)
                    if reading.run_status == WorkflowExecutionStatus.FAILED.name:
                        raise RolloutError(await _why(handle))
                    if reading.record is not None:
                        return reading.record
                    await asyncio.sleep(_PAUSE_SECONDS)
        except TimeoutError:
            raise RolloutError(f"started, but not begun: {_NO_WORKER}") from None

    async def read(self, pool: str) -> RolloutReading:
        """The running rollout of a pool, else its last one.

        Raises:
            NoRolloutError: there is none.
            RolloutError: no answer in time.
        """
        try:
            async with asyncio.timeout(CALL_LIMIT.total_seconds()):
                return await self._read(self._client.get_workflow_handle(rollout_id(pool)))
        except RPCError as error:
            raise _explained(error, pool) from None
        except TimeoutError:
            raise RolloutError("Temporal did not answer in time") from None

    async def steer(self, pool: str, update: str, *arguments: bool) -> None:
        """Send `pause`, `resume`, `abort` or `decide` to the running rollout.

        Raises:
            NoRolloutError: none is running.
            RolloutError: it is decided already, or nobody answered.
        """
        handle = self._client.get_workflow_handle(rollout_id(pool))
        try:
            async with asyncio.timeout(CALL_LIMIT.total_seconds()):
                await handle.execute_update(update, args=arguments)
        except WorkflowUpdateFailedError as error:
            raise RolloutError(_words(error.cause)) from None
        except (WorkflowUpdateRPCTimeoutOrCancelledError, TimeoutError):
            raise RolloutError(_NO_WORKER) from None
        except RPCError as error:
            raise _explained(error, pool) from None

    async def until_ended(self, pool: str, *, limit: timedelta = CALL_LIMIT) -> RolloutReading:
        """Wait for the end of a rollout that has been decided; as it is then, or after `limit`.

        Raises:
            RolloutError: no answer in time.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + limit.total_seconds()
        while True:
            reading = await self.read(pool)
            if not reading.open or loop.time() >= give_up_at:
                return reading
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _read(self, handle: WorkflowHandle[Any, Any]) -> RolloutReading:
        described = await handle.describe()
        record: RolloutRecord | None = await described.memo_value(MEMO_RECORD, None, type_hint=RolloutRecord)
        status = described.status or WorkflowExecutionStatus.RUNNING
        return RolloutReading(open=status is WorkflowExecutionStatus.RUNNING, run_status=status.name, record=record)


async def _why(handle: WorkflowHandle[RolloutWorkflow, RolloutRecord]) -> str:
    try:
        await handle.result()
    except WorkflowFailureError as error:
        return _words(error.cause)
    return "it ended at once"


def _words(error: BaseException | None) -> str:
    """What the innermost failure says."""
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    return error.message if isinstance(error, FailureError) else str(error)


def _explained(error: RPCError, pool: str) -> RolloutError:
    if error.status is RPCStatusCode.NOT_FOUND:
        return NoRolloutError(f"pool {pool} has no rollout" + (" that runs" if "completed" in error.message else ""))
    return RolloutError(f"Temporal answered {error.status.name}: {error.message}")
