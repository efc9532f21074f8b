"""Branches of a rollout whose histories are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from temporalio.client import Client, WorkflowFailureError

from tests.replay.runs import all_runs
from tests.workflows.rollout_stage import (
    HOLDS,
    PATIENT,
    QUICK,
    TOO_FEW,
    WORSE,
    RolloutHandle,
    RolloutStage,
    Seen,
    rollout_stage,
)
from workflows.canary_rule import Verdict
from workflows.rollout import RolloutWorkflow
from workflows.rollouts import RolloutInput, RolloutPhase

During = Callable[[RolloutStage, RolloutHandle], Awaitable[None]]


async def nothing(scene: RolloutStage, handle: RolloutHandle) -> None:
    """Only watch."""


async def ask_and_promote(scene: RolloutStage, handle: RolloutHandle) -> None:
    """Nobody can tell, so an operator decides."""
    await scene.until(RolloutPhase.ASKING)
    await handle.execute_update(RolloutWorkflow.decide, True)


async def pause_and_abort(scene: RolloutStage, handle: RolloutHandle) -> None:
    """An operator pauses, resumes and aborts."""
    await scene.until(RolloutPhase.OBSERVING, looks=1)
    await handle.execute_update(RolloutWorkflow.pause)
    await scene.until(RolloutPhase.PAUSED)
    await handle.execute_update(RolloutWorkflow.resume)
    await scene.until(RolloutPhase.OBSERVING)
    await handle.execute_update(RolloutWorkflow.abort)


async def cancel(scene: RolloutStage, handle: RolloutHandle) -> None:
    """Temporal cancel."""
    await scene.until(RolloutPhase.OBSERVING, looks=1)
    await handle.cancel()


async def pause_and_supersede(scene: RolloutStage, handle: RolloutHandle) -> None:
    """Somebody else has changed the deployment when an operator pauses."""
    await scene.until(RolloutPhase.OBSERVING)
    scene.deployment.current = "other"
    await handle.execute_update(RolloutWorkflow.pause)


async def abort_and_supersede(scene: RolloutStage, handle: RolloutHandle) -> None:
    """Somebody else has changed the deployment when an operator aborts."""
    await scene.until(RolloutPhase.OBSERVING)
    scene.deployment.current = "other"
    await handle.execute_update(RolloutWorkflow.abort)


async def cancel_too_late(scene: RolloutStage, handle: RolloutHandle) -> None:
    """Temporal cancel while a promotion is carried out."""
    scene.deployment.may_settle.clear()
    await scene.until(RolloutPhase.OBSERVING)
    await handle.execute_update(RolloutWorkflow.decide, True)
    await handle.cancel()
    scene.deployment.may_settle.set()


async def abort_in_look(scene: RolloutStage, handle: RolloutHandle) -> None:
    """An operator aborts during a look."""
    scene.deployment.may_look.clear()
    await scene.until(RolloutPhase.OBSERVING, looks=1)
    await handle.execute_update(RolloutWorkflow.abort)
    scene.deployment.may_look.set()


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One way that a rollout goes."""

    given: RolloutInput
    looks: tuple[Seen, ...]
    during: During = nothing
    refuses: bool = False


SILENT = Seen(verdict=Verdict.TOO_FEW, polls=False)
BRANCHES: Mapping[str, Branch] = {
    "promoted": Branch(given=QUICK, looks=(TOO_FEW, HOLDS)),
    "rolled-back": Branch(given=PATIENT, looks=(TOO_FEW, WORSE)),
    "asked": Branch(given=QUICK, looks=(TOO_FEW,), during=ask_and_promote),
    "paused-and-aborted": Branch(given=PATIENT, looks=(TOO_FEW,), during=pause_and_abort),
    "canceled": Branch(given=PATIENT, looks=(TOO_FEW,), during=cancel),
    "canceled-too-late": Branch(given=PATIENT, looks=(TOO_FEW,), during=cancel_too_late),
    "aborted-in-look": Branch(given=PATIENT, looks=(TOO_FEW,), during=abort_in_look),
    "silent": Branch(given=replace(PATIENT, overdue_seconds=0.2), looks=(SILENT,)),
    "superseded": Branch(given=PATIENT, looks=(Seen(verdict=Verdict.HOLDS, ours=False),)),
    "superseded-at-pause": Branch(
        given=replace(PATIENT, look_seconds=60.0), looks=(TOO_FEW,), during=pause_and_supersede
    ),
    "superseded-at-abort": Branch(
        given=replace(PATIENT, look_seconds=60.0), looks=(TOO_FEW,), during=abort_and_supersede
    ),
    "refused": Branch(given=PATIENT, looks=(TOO_FEW,), refuses=True),
    "continued-as-new": Branch(
        given=replace(PATIENT, continue_after_events=12), looks=(TOO_FEW, TOO_FEW, TOO_FEW, WORSE)
    ),
}


async def histories(client: Client, name: str) -> list[str]:
    """Run one branch; the histories of its runs, oldest first."""
    branch = BRANCHES[name]
    async with rollout_stage(client, *branch.looks) as scene:
        scene.deployment.refuses = branch.refuses
        handle = await scene.start(branch.given)
        await branch.during(scene, handle)
        with contextlib.suppress(WorkflowFailureError):
            await handle.result()
        return await all_runs(client, handle.id, handle.first_execution_run_id)
