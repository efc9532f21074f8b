"""One GPU slot and many who want it: exact order of priorities, and no flood in front of another user's first task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.api.conftest import running_stand
from tests.api.stand import WORK_SECONDS, PlayedGeneration, Stand, until
from tests.api.test_backlog import queues_of
from tests.scale import scaled


@pytest_asyncio.fixture(scope="module")
async def _narrow(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Stand, PlayedGeneration]]:
    folder = tmp_path_factory.mktemp("narrow")
    async with running_stand(folder) as stand, stand.control_worker(), stand.gpu_worker(slots=1) as played:
        yield stand, played


@pytest.fixture
def narrow(_narrow: tuple[Stand, PlayedGeneration]) -> Stand:
    """A gateway with one slot."""
    return _narrow[0]


@pytest.fixture
def slot(_narrow: tuple[Stand, PlayedGeneration]) -> PlayedGeneration:
    """The slot."""
    return _narrow[1]


async def submit(http: httpx.AsyncClient, prompt: str, **fields: object) -> dict[str, Any]:
    reply = await http.post("/tasks", json={"prompt": prompt, **fields})
    assert reply.status_code == 202, reply.text
    task: dict[str, Any] = reply.json()
    return task


async def all_queued(stand: Stand, count: int) -> None:
    """Return when so many tasks have reached the GPU queue; their jobs take a moment to get there."""
    queues = queues_of(stand)
    async with asyncio.timeout(30):
        while (seen := await queues.pool("default")) is None or seen.backlog < count:
            await asyncio.sleep(0.2)


async def test_higher_priorities_go_first_in_exact_order(narrow: Stand, slot: PlayedGeneration) -> None:
    async with narrow.user() as http:
        blocker = await submit(http, "hold the slot")
        await until(http, blocker["task_id"], status="PROCESSING")
        tasks: dict[str, list[str]] = {}
        for priority in ("low", "normal", "high"):
            for number in range(2):
                task = await submit(http, f"clip {priority} {number}", priority=priority)
                await until(http, task["task_id"], status="QUEUED")
                tasks.setdefault(priority, []).append(task["task_id"])
        await all_queued(narrow, 6)
        before = len(slot.calls)
        slot.release(blocker)
        for task_id in tasks["low"]:
            await until(http, task_id, status="SUCCEEDED")
        order = [call.task_id for call in slot.calls[before:]]
        ranks = {task_id: priority for priority, ids in tasks.items() for task_id in ids}
        assert [ranks[task_id] for task_id in order] == ["high"] * 2 + ["normal"] * 2 + ["low"] * 2


@pytest.mark.soak
async def test_a_flood_delays_another_users_first_task_by_at_most_one_task_length(
    narrow: Stand, slot: PlayedGeneration
) -> None:
    flood_size = scaled(200)
    async with narrow.user() as flooding, narrow.user() as modest:
        async with asyncio.TaskGroup() as group:
            for number in range(flood_size):
                group.create_task(submit(flooding, f"work {number}"))
        began = len(slot.calls)
        task = await submit(modest, "work too")
        await until(modest, task["task_id"], timeout=flood_size * WORK_SECONDS + 30, status="SUCCEEDED")
        mine = slot.taken[task["task_id"]]
        ahead = sum(mine.scheduled_time < other.started_time < mine.started_time for other in slot.taken.values())
        # It waits for the one that ran when it came. The slot may free itself, and be given away, in the same moment.
        assert ahead <= 1, f"{ahead} of {flood_size} tasks were started before it"
        assert flood_size - began >= 3, "the flood was over before it came"


async def test_a_batch_and_the_tasks_of_another_user_share_the_gpu(narrow: Stand, slot: PlayedGeneration) -> None:
    async with narrow.user() as batching, narrow.user() as modest:
        items = [{"prompt": f"work on item {number}"} for number in range(12)]
        batch = (await batching.post("/batches", json={"items": items})).json()
        async with asyncio.timeout(20):
            while not any(call.parameters.prompt.startswith("work on item") for call in slot.calls):
                await asyncio.sleep(0.02)
        tasks = [await submit(modest, f"work beside a batch {number}") for number in range(3)]
        for task in tasks:
            await until(modest, task["task_id"], timeout=30, status="SUCCEEDED")
        # Three of its own, three of the batch's in turn, and what was dispatched while the jobs were starting.
        read = (await batching.get(f"/batches/{batch['batch_id']}")).json()
        assert read["counts"]["SUCCEEDED"] <= 9
        assert not read["is_terminal"]
        await batching.post(f"/batches/{batch['batch_id']}/cancel", json={"mode": "hard"})
        async with asyncio.timeout(30):
            while not (await batching.get(f"/batches/{batch['batch_id']}")).json()["is_terminal"]:
                await asyncio.sleep(0.1)
