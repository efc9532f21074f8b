"""Every way a rollout can go, on a real server with scripted observations."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from temporalio.client import Client, WorkflowFailureError, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError, CancelledError

from tests.workflows.rollout_stage import HOLDS, PATIENT, QUICK, TOO_FEW, WORSE, Seen, rollout_stage
from workflows.canary_rule import Verdict
from workflows.rollout import ROLLOUT_OVER, RolloutWorkflow
from workflows.rollouts import RolloutAction, RolloutPhase, RolloutRecord

A = RolloutAction


def actions(record: RolloutRecord) -> list[RolloutAction]:
    return [decision.action for decision in record.decisions]


async def test_a_canary_that_holds_is_promoted_when_the_time_is_over_and_not_before(client: Client) -> None:
    async with rollout_stage(client, HOLDS) as scene:
        record = await (await scene.start(QUICK)).result()
        assert (scene.deployment.current, scene.deployment.ramping) == ("new", None)
    assert record.phase is RolloutPhase.PROMOTED
    assert actions(record) == [A.RAMP, A.PROMOTE]
    assert record.observed_seconds >= QUICK.observe_seconds
    assert (record.current, record.canary, record.percentage) == ("old", "new", 100.0)


async def test_a_worse_canary_is_rolled_back_at_once(client: Client) -> None:
    async with rollout_stage(client, TOO_FEW, WORSE) as scene:
        record = await (await scene.start(PATIENT)).result()
        assert (scene.deployment.current, scene.deployment.ramping) == ("old", None)
        assert len(scene.deployment.observed) == 2
    assert record.phase is RolloutPhase.ROLLED_BACK
    assert record.percentage == 0.0
    decision = record.decisions[-1]
    assert (decision.action, decision.reason) == (A.ROLL_BACK, "scripted: worse")
    assert decision.comparison is not None
    assert decision.comparison.verdict is Verdict.WORSE


async def test_what_every_look_sees_is_added_up(client: Client) -> None:
    async with rollout_stage(client, *[TOO_FEW] * 3, WORSE) as scene:
        await (await scene.start(PATIENT)).result()
        looks = scene.deployment.observed
    assert [look.canary_before.tasks for look in looks] == [0, 1, 2, 3]
    assert [look.current_before.tasks for look in looks] == [0, 2, 4, 6]
    assert all(earlier.since < later.since for earlier, later in pairwise(looks))


@pytest.mark.parametrize("seen", [TOO_FEW, Seen(verdict=Verdict.DIFFERS)], ids=lambda seen: seen.verdict)
async def test_without_a_result_it_is_extended_then_an_operator_is_asked(client: Client, seen: Seen) -> None:
    async with rollout_stage(client, seen) as scene:
        handle = await scene.start(QUICK)
        asking = await scene.until(RolloutPhase.ASKING)
        assert actions(asking) == [A.RAMP, A.EXTEND, A.ASK]
        assert asking.observed_seconds >= 2 * QUICK.observe_seconds
        assert scene.deployment.ramping == "new"
        await handle.execute_update(RolloutWorkflow.decide, True)
        record = await handle.result()
        assert scene.deployment.current == "new"
    assert record.phase is RolloutPhase.PROMOTED
    assert record.decisions[-1].reason == "by an operator"


async def test_while_it_asks_a_good_canary_waits_and_a_worse_one_goes(client: Client) -> None:
    async with rollout_stage(client, TOO_FEW) as scene:
        handle = await scene.start(replace(QUICK, max_extensions=0))
        await scene.until(RolloutPhase.ASKING)
        looks = len(scene.deployment.observed)
        scene.deployment.looks = [HOLDS]
        await scene.until(RolloutPhase.ASKING, looks=looks + 3)
        scene.deployment.looks = [WORSE]
        assert (await handle.result()).phase is RolloutPhase.ROLLED_BACK


async def test_an_operator_may_roll_back_whatever_the_numbers_say(client: Client) -> None:
    async with rollout_stage(client, HOLDS) as scene:
        handle = await scene.start(PATIENT)
        await handle.execute_update(RolloutWorkflow.decide, False)
        record = await handle.result()
    assert (record.phase, scene.deployment.current) == (RolloutPhase.ROLLED_BACK, "old")


async def test_a_pause_takes_the_share_away_and_stops_the_clock_until_resume(client: Client) -> None:
    async with rollout_stage(client, TOO_FEW) as scene:
        handle = await scene.start(PATIENT)
        await scene.until(RolloutPhase.OBSERVING, looks=2)
        await handle.execute_update(RolloutWorkflow.pause)
        paused = await scene.until(RolloutPhase.PAUSED)
        assert (paused.percentage, scene.deployment.percentage) == (0.0, 0.0)
        looks = len(scene.deployment.observed)
        events = (await handle.describe()).history_length
        await handle.execute_update(RolloutWorkflow.pause)
        assert len(scene.deployment.observed) == looks
        # No timer runs in a pause: what is new in the history is the second update.
        assert (await handle.describe()).history_length <= events + 5
        await handle.execute_update(RolloutWorkflow.resume)
        resumed = await scene.until(RolloutPhase.OBSERVING, looks=looks + 1)
        assert scene.deployment.shares == [0.0, 5.0]
        assert resumed.percentage == 5.0
        await handle.execute_update(RolloutWorkflow.abort)
        record = await handle.result()
        assert (scene.deployment.current, scene.deployment.ramping) == ("old", None)
    assert record.phase is RolloutPhase.ABORTED
    assert actions(record) == [A.RAMP, A.PAUSE, A.RESUME, A.ABORT]


async def test_a_canary_that_asks_for_no_work_is_rolled_back(client: Client) -> None:
    silent = Seen(verdict=Verdict.TOO_FEW, polls=False)
    async with rollout_stage(client, silent, TOO_FEW, *[silent] * 50) as scene:
        record = await (await scene.start(replace(PATIENT, overdue_seconds=0.3))).result()
        # The one look at which it did ask has started the count again.
        assert len(scene.deployment.observed) >= 4
    assert record.phase is RolloutPhase.ROLLED_BACK
    assert record.decisions[-1].reason.startswith("no worker of it has asked for work")


async def test_a_deployment_that_somebody_else_changed_is_left_alone(client: Client) -> None:
    async with rollout_stage(client, TOO_FEW, Seen(verdict=Verdict.WORSE, ours=False)) as scene:
        record = await (await scene.start(PATIENT)).result()
        assert scene.deployment.ramping == "new"
    assert record.phase is RolloutPhase.SUPERSEDED
    assert actions(record) == [A.RAMP, A.STAND_DOWN]


@pytest.mark.parametrize("order", ["pause", "abort"])
async def test_so_it_is_when_an_operator_wants_something(client: Client, order: str) -> None:
    async with rollout_stage(client, TOO_FEW) as scene:
        handle = await scene.start(replace(PATIENT, look_seconds=3600))
        await scene.until(RolloutPhase.OBSERVING)
        scene.deployment.current = "other"
        await handle.execute_update(order)
        record = await handle.result()
    assert (record.phase, scene.deployment.current) == (RolloutPhase.SUPERSEDED, "other")


async def test_a_temporal_cancel_is_an_abort(client: Client) -> None:
    async with rollout_stage(client, TOO_FEW) as scene:
        handle = await scene.start(PATIENT)
        await scene.until(RolloutPhase.OBSERVING, looks=1)
        await handle.cancel()
        with pytest.raises(WorkflowFailureError) as failed:
            await handle.result()
        assert isinstance(failed.value.cause, CancelledError)
        record = await scene.record()
        assert record is not None
        assert (record.phase, scene.deployment.ramping) == (RolloutPhase.ABORTED, None)


async def test_a_rollout_that_cannot_begin_fails_with_the_reason(client: Client) -> None:
    async with rollout_stage(client, HOLDS) as scene:
        scene.deployment.refuses = True
        handle = await scene.start(QUICK)
        with pytest.raises(WorkflowFailureError) as failed:
            await handle.result()
    assert "no such version" in str(failed.value.cause.__cause__)


async def test_after_a_decision_every_update_is_refused(client: Client) -> None:
    async with rollout_stage(client, TOO_FEW) as scene:
        scene.deployment.may_settle.clear()
        handle = await scene.start(PATIENT)
        await scene.until(RolloutPhase.OBSERVING)
        await handle.execute_update(RolloutWorkflow.decide, True)
        for update, args in (("pause", []), ("resume", []), ("abort", []), ("decide", [False])):
            with pytest.raises(WorkflowUpdateFailedError) as refused:
                await handle.execute_update(update, args=args)
            assert isinstance(refused.value.cause, ApplicationError)
            assert refused.value.cause.type == ROLLOUT_OVER
        scene.deployment.may_settle.set()
        assert (await handle.result()).phase is RolloutPhase.PROMOTED


async def test_it_continues_as_new_with_everything_it_knows(client: Client) -> None:
    async with rollout_stage(client, *[TOO_FEW] * 8, WORSE) as scene:
        handle = await scene.start(replace(PATIENT, continue_after_events=15))
        record = await handle.result()
        described = await client.get_workflow_handle(handle.id).describe()
    assert described.run_id != handle.first_execution_run_id
    assert [look.canary_before.tasks for look in scene.deployment.observed] == list(range(9))
    assert actions(record) == [A.RAMP, A.ROLL_BACK]
    assert record.current == "old"


async def test_a_pause_survives_continue_as_new(client: Client) -> None:
    async with rollout_stage(client, TOO_FEW) as scene:
        handle = await scene.start(replace(PATIENT, continue_after_events=12))
        await scene.until(RolloutPhase.OBSERVING)
        run = client.get_workflow_handle(handle.id)
        await run.execute_update("pause")
        await scene.until(RolloutPhase.PAUSED)
        await run.execute_update("resume")
        await scene.until(RolloutPhase.OBSERVING)
        await run.execute_update("abort")
        assert (await handle.result()).phase is RolloutPhase.ABORTED
