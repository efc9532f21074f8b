"""BatchWorkflow: every item ends once, done items never run again, and a stop leaves nothing open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError
from temporalio.service import RPCError

from activities.storage import ObjectStore
from tests.scale import scaled
from tests.workflows.batch_stage import BatchStage, PlayedByPrompt, batch_stage
from workflows import naming
from workflows.batch import BatchWorkflow
from workflows.batches import BatchStatus, item_content
from workflows.failures import FailureCode
from workflows.tasks import AdmissionPlace, CancelMode


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url((tmp_path / "store").as_uri())


@pytest_asyncio.fixture
async def scene(client: Client, store: ObjectStore) -> AsyncIterator[BatchStage]:
    async with batch_stage(client, store) as opened:
        yield opened


async def test_every_item_is_a_task_of_its_own_and_one_callback_tells_of_the_end(scene: BatchStage) -> None:
    given, handle = await scene.post(["ok a", "fail b", "ok c"])
    record = await handle.result()
    assert (record.status, record.states, record.gpu_seconds) == (BatchStatus.COMPLETED, "SFS", 2.0)
    assert scene.played.runs == {"ok a": 1, "fail b": 1, "ok c": 1}
    for index in range(3):
        key = naming.batch_item_key(given.root_id, index, item_content(given.contents, index))
        job = await scene.client.get_workflow_handle(naming.task_id(given.user, key)).describe()
        assert job.typed_search_attributes.get(naming.BATCH_ID) == given.batch_id
        assert job.status is not WorkflowExecutionStatus.RUNNING
    await scene.client.get_workflow_handle(naming.callback_id(given.batch_id)).result()
    (body,) = scene.callbacks(given)
    sent = json.loads(body or "")
    assert (sent["type"], sent["batch_id"], sent["status"]) == ("batch.completed", given.batch_id, "COMPLETED")
    assert sent["counts"] == {
        **dict.fromkeys(["CREATED", "QUEUED", "PROCESSING", "TIMEOUT", "CANCELED"], 0),
        "SUCCEEDED": 2,
        "FAILED": 1,
    }
    assert sent["links"] == {"self": given.url}


async def test_at_most_so_many_items_are_open_at_a_time(scene: BatchStage) -> None:
    given, handle = await scene.post([f"hold {n}" for n in range(7)], parallelism=3)
    await scene.until("OOOCCCC", given)
    await asyncio.sleep(0.3)
    assert len(scene.played.running) == 3
    scene.played.released.set()
    assert (await handle.result()).states == "SSSSSSS"
    assert scene.played.most_running == 3


async def test_rejected_items_stay_as_they_are(scene: BatchStage) -> None:
    _, handle = await scene.post(["ok a", "ok b", "ok c"], states="C-C")
    assert (await handle.result()).states == "S-S"
    assert set(scene.played.runs) == {"ok a", "ok c"}


async def test_posted_again_done_items_answer_and_the_others_run_as_the_next_task_of_their_chain(
    scene: BatchStage,
) -> None:
    prompts = ["ok a", "fail b", "ok c"]
    first, handle = await scene.post(prompts)
    await handle.result()
    scene.played.broken = False
    second, handle = await scene.post(prompts, after=first)
    record = await handle.result()
    assert (record.states, record.links, record.gpu_seconds) == ("SSS", {"1": 1}, 1.0)
    assert scene.played.runs == {"ok a": 1, "fail b": 2, "ok c": 1}
    key = naming.batch_item_key(first.root_id, 1, item_content(first.contents, 1))
    again = naming.task_id(first.user, key, after=naming.task_id(first.user, key))
    job = await scene.client.get_workflow_handle(again).describe()
    assert job.typed_search_attributes.get(naming.BATCH_ID) == second.batch_id


async def test_a_task_that_a_lost_batch_left_running_is_taken_over(scene: BatchStage) -> None:
    first, handle = await scene.post(["hold a", "ok b"], parallelism=1)
    await scene.until("OC", first)
    await handle.terminate()
    second, handle = await scene.post(["hold a", "ok b"], after=first, parallelism=1, look_seconds=0.3)
    await scene.until("OC", second)
    scene.played.released.set()
    record = await handle.result()
    assert record.states == "SS"
    assert scene.played.runs == {"hold a": 1, "ok b": 1}


async def test_a_task_that_is_terminated_or_deleted_is_noticed(scene: BatchStage) -> None:
    given, handle = await scene.post(["hold a", "ok b"], parallelism=1, look_seconds=0.3)
    await scene.until("OC", given)
    key = naming.batch_item_key(given.root_id, 0, item_content(given.contents, 0))
    await scene.client.get_workflow_handle(naming.task_id(given.user, key)).terminate()
    record = await handle.result()
    assert (record.status, record.states) == (BatchStatus.COMPLETED, "XS")
    assert record.started == (0,)


async def test_a_hard_cancel_stops_the_open_items_and_starts_no_more(scene: BatchStage) -> None:
    given, handle = await scene.post(["ok a", "hold b", "hold c", "ok d"])
    await scene.until("SOOC", given)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    record = await scene.record(given)
    assert record is not None
    assert (record.status, record.states) == (BatchStatus.CANCELED, "SXXX")
    assert (record.cancel_requested, record.started, record.error_code) == (CancelMode.HARD, (1, 2), None)
    assert (await handle.describe()).status is WorkflowExecutionStatus.CANCELED
    assert not scene.played.running
    assert scene.played.runs["ok d"] == 0
    await scene.client.get_workflow_handle(naming.callback_id(given.batch_id)).result()
    assert json.loads(scene.callbacks(given)[0] or "")["status"] == "CANCELED"


async def test_a_soft_cancel_lets_running_items_keep_their_clips(scene: BatchStage) -> None:
    given, handle = await scene.post(["hold a", "ok b"], parallelism=1)
    await scene.until("OC", given)
    await asyncio.wait_for(scene.played.started.wait(), 10)
    await handle.signal(BatchWorkflow.cancel_soft)
    await scene.until("OX", given)
    scene.played.released.set()
    record = await handle.result()
    assert (record.status, record.states) == (BatchStatus.CANCELED, "XX")
    assert (record.cancel_requested, record.started) == (CancelMode.SOFT, (0,))
    assert scene.played.published


async def test_a_hard_cancel_overtakes_a_soft_one(scene: BatchStage) -> None:
    given, handle = await scene.post(["hold a", "ok b"], parallelism=1)
    await asyncio.wait_for(scene.played.started.wait(), 10)
    await handle.signal(BatchWorkflow.cancel_soft)
    await scene.until("OX", given)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    assert not scene.played.published


async def test_at_its_deadline_the_rest_is_canceled(scene: BatchStage) -> None:
    given, handle = await scene.post(["ok a", "hold b", "hold c", "ok d"], deadline_seconds=2)
    record = await handle.result()
    assert (record.status, record.states) == (BatchStatus.CANCELED, "SXXX")
    assert (record.error_code, record.cancel_requested) == (FailureCode.DEADLINE_EXCEEDED, None)
    described = await scene.client.get_workflow_handle(given.batch_id).describe()
    assert described.typed_search_attributes.get(naming.ERROR_CODE) == "DEADLINE_EXCEEDED"


async def test_without_its_items_a_batch_ends_and_says_why(scene: BatchStage) -> None:
    _, handle = await scene.post(["ok a", "ok b"], stored=False)
    record = await handle.result()
    assert (record.status, record.states, record.error_code) == (BatchStatus.CANCELED, "XX", FailureCode.INPUT_GONE)
    assert not scene.played.runs


async def test_the_items_are_removed_when_the_batch_has_ended(scene: BatchStage, store: ObjectStore) -> None:
    given, handle = await scene.post(["ok a"])
    await handle.result()
    assert await store.head(given.items_key) is None


async def test_the_place_is_given_back_with_what_was_used(scene: BatchStage) -> None:
    # Any workflow with a signal `release` will do as an admission.
    admission, watched = await scene.post(["hold x"])
    await scene.until("O", admission)
    place = AdmissionPlace(admission_id=admission.batch_id, token="p")
    given, handle = await scene.post(["ok a"], places=(place,))
    await handle.result()
    history = await watched.fetch_history()
    released = [
        await scene.client.data_converter.decode(
            event.workflow_execution_signaled_event_attributes.input.payloads, [str, str, float]
        )
        for event in history.events
        if event.workflow_execution_signaled_event_attributes.signal_name == "release"
    ]
    assert released == [[given.batch_id, "p", 1.0]]


async def test_a_batch_goes_on_after_continuing_as_new(scene: BatchStage) -> None:
    size = 12
    given, handle = await scene.post([f"ok {n}" for n in range(size)], continue_after_events=30)
    record = await handle.result()
    assert record.states == "S" * size
    assert set(scene.played.runs.values()) == {1}
    last = await scene.client.get_workflow_handle(given.batch_id).describe()
    assert last.run_id != handle.first_execution_run_id
    assert last.typed_search_attributes.get(naming.BATCH_ID) == given.batch_id
    assert naming.MEMO_REQUEST in last.raw_description.workflow_execution_info.memo.fields


async def test_a_cancel_that_meets_a_continue_as_new_is_not_lost(client: Client, store: ObjectStore) -> None:
    # Both are in the first workflow task: there is no worker yet, and any history is long.
    given, handle = await BatchStage(client=client, store=store, played=PlayedByPrompt(client)).post(
        ["hold a", "hold b"], continue_after_events=1
    )
    await handle.cancel()
    async with batch_stage(client, store) as scene:
        try:
            with pytest.raises(WorkflowFailureError):
                await asyncio.wait_for(handle.result(), 30)
            record = await scene.record(given)
        finally:
            with suppress(RPCError):
                await client.get_workflow_handle(given.batch_id).terminate()
    assert record is not None
    assert record.status is BatchStatus.CANCELED


async def test_a_batch_without_cache_replays_to_the_same_end(client: Client, store: ObjectStore) -> None:
    async with batch_stage(client, store, cache=0) as scene:
        given, handle = await scene.post(["ok a", "hold b", "fail c", "ok d"])
        await scene.until("SOFS", given)
        scene.played.released.set()
        assert (await handle.result()).states == "SSFS"


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_thousand_items_stay_within_the_history_limits(scene: BatchStage) -> None:
    size = scaled(1_000)
    given, handle = await scene.post([f"ok {n}" for n in range(size)], parallelism=8)
    with suppress(WorkflowFailureError):
        await handle.result()
    record = await scene.record(given)
    assert record is not None
    assert record.states == "S" * size
    assert set(scene.played.runs.values()) == {1}
    runs = [run async for run in scene.client.list_workflows(f"WorkflowId = '{given.batch_id}'")]
    events = [(await scene.client.get_workflow_handle(run.id, run_id=run.run_id).describe()) for run in runs]
    assert max(description.history_length for description in events) < 10_000
