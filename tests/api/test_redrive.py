"""POST /redrive: dead letters run again by an operator, once, without costing their owners anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
import pytest_asyncio
from typer.testing import CliRunner

from api import cli_redrive
from api.cli import app
from api.cli_output import CommandError
from tests.api.conftest import running_stand
from tests.api.stand import PlayedGeneration, Stand, http_client, until
from tests.api.test_problems import assert_problem
from workflows import naming
from workflows.tasks import GenerationInput

MAX_BACKLOG = 6


@pytest_asyncio.fixture(scope="module")
async def shop(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """A gateway with a control worker and short queues; one attempt is all a task has."""
    folder = tmp_path_factory.mktemp("shop")
    async with running_stand(folder, max_attempts=1, max_backlog=MAX_BACKLOG) as stand, stand.control_worker():
        yield stand


@pytest_asyncio.fixture
async def ops(shop: Stand) -> AsyncIterator[httpx.AsyncClient]:
    """An operator."""
    async with http_client(f"{shop.url}/api/v1", {"Authorization": f"Bearer {shop.keys['operator']}"}) as http:
        yield http


@pytest_asyncio.fixture
async def gpu(shop: Stand) -> AsyncIterator[PlayedGeneration]:
    """The GPU pool is served, and known to be."""
    async with shop.gpu_worker() as played:
        yield played


@pytest.fixture
def start() -> str:
    """What ended before does not matter to a test."""
    return datetime.now(UTC).isoformat()


async def ended(http: httpx.AsyncClient, prompt: str, **fields: object) -> dict[str, Any]:
    reply = await http.post("/tasks", json={"prompt": prompt, **fields})
    assert reply.status_code == 202, reply.text
    return await until(http, reply.json()["task_id"], is_terminal=True)


async def redrive(ops: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    reply = await ops.post("/redrive", json=fields)
    assert reply.status_code == 200, reply.text
    page: dict[str, Any] = reply.json()
    return page


async def indexed(ops: httpx.AsyncClient, tasks: list[dict[str, Any]], **fields: object) -> dict[str, Any]:
    """The dry run once the index has these tasks."""
    wanted = {task["task_id"] for task in tasks}
    async with asyncio.timeout(30):
        while True:
            page = await redrive(ops, **fields)
            if wanted <= {item["task_id"] for item in page["items"]}:
                return page
            await asyncio.sleep(0.05)


async def served(ops: httpx.AsyncClient) -> None:
    """The gateway knows that the pool has a worker."""
    async with asyncio.timeout(30):
        while not (await ops.get("/queues")).json()["items"][0]["live_slots"]:
            await asyncio.sleep(0.1)


def verdicts(page: dict[str, Any]) -> dict[str, str]:
    return {item["task_id"]: item["reason"] or item["action"] for item in page["items"]}


async def request_of(stand: Stand, task_id: str) -> GenerationInput:
    described = await stand.client.get_workflow_handle(task_id).describe()
    request: GenerationInput = await described.memo_value(naming.MEMO_REQUEST, type_hint=GenerationInput)
    return request


async def command(shop: Stand, *arguments: str, key: str = "operator") -> tuple[int, str, str]:
    """`reelgate redrive`: exit code, output and what it told."""
    environment = {"REELGATE_URL": shop.url, "REELGATE_API_KEY": shop.keys[key]}

    def invoke() -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["redrive", *arguments], env=environment)
        if isinstance(done.exception, CommandError):
            return done.exception.code, done.stdout, str(done.exception)
        return done.exit_code, done.stdout, done.stderr

    return await asyncio.to_thread(invoke)


async def test_without_a_worker_nothing_is_started_by_request_or_command(
    shop: Stand, ops: httpx.AsyncClient, start: str
) -> None:
    async with shop.user() as http:
        async with shop.gpu_worker():
            task = await ended(http, "flaky one")
        await indexed(ops, [task], since=start)
        async with asyncio.timeout(30):
            while (await ops.get("/queues")).json()["items"][0]["live_slots"] != 0:
                await asyncio.sleep(0.1)
        page = await redrive(ops, since=start, dry_run=False)
        assert (page["items"], page["counts"]["started"], page["stopped"]["code"]) == ([], 0, "NO_WORKER")
        code, _, told = await command(shop, "--since", start, "--yes")
        assert (code, "No live worker serves pool default" in told) == (3, True)
        assert verdicts(await redrive(ops, since=start)) == {task["task_id"]: "start"}, "nothing was started"


async def test_a_dry_run_starts_nothing_and_a_run_starts_each_dead_letter_once(
    shop: Stand, ops: httpx.AsyncClient, gpu: PlayedGeneration, start: str
) -> None:
    async with shop.user() as http, shop.user() as other:
        tasks = [await ended(http, "flaky one", seed=7, labels=["a"]), await ended(other, "flaky two")]
        await ended(http, "fine")
        await served(ops)
        planned = await indexed(ops, tasks, since=start)
        assert planned["dry_run"] is True
        assert planned["matching"] == 2
        assert verdicts(planned) == {task["task_id"]: "start" for task in tasks}
        assert {(item["status"], item["error_code"]) for item in planned["items"]} == {
            ("FAILED", "STORAGE_UNAVAILABLE")
        }
        new = {item["task_id"]: item["new_task_id"] for item in planned["items"]}
        assert (await http.get(f"/tasks/{new[tasks[0]['task_id']]}")).status_code == 404, "it was a dry run"

        gpu.mended = True
        done = await redrive(ops, since=start, dry_run=False)
        assert done["counts"] == {"started": 2, "skipped": {}}
        assert done["stopped"] is None
        assert {item["task_id"]: item["new_task_id"] for item in done["items"]} == new
        again = await until(http, new[tasks[0]["task_id"]], status="SUCCEEDED")
        assert again["retry_of"] == tasks[0]["task_id"]
        assert (again["parameters"], again["labels"]) == (tasks[0]["parameters"], ["a"])
        await until(other, new[tasks[1]["task_id"]], status="SUCCEEDED")

        repeated = await redrive(ops, since=start, dry_run=False)
        assert repeated["counts"] == {"started": 0, "skipped": {"RETRIED": 2}}
        assert {item["task_id"]: item["new_task_id"] for item in repeated["items"]} == new


async def test_parallel_redrives_and_the_owners_retry_meet_in_one_task(
    shop: Stand, ops: httpx.AsyncClient, gpu: PlayedGeneration, start: str
) -> None:
    async with shop.user() as http:
        task = await ended(http, "flaky one")
        await served(ops)
        await indexed(ops, [task], since=start)
        gpu.mended = True
        retrying = asyncio.create_task(http.post(f"/tasks/{task['task_id']}/retry"))
        pages = await asyncio.gather(*(redrive(ops, since=start, dry_run=False) for _ in range(5)))
        retried = await retrying
        following = {page["items"][0]["new_task_id"] for page in pages} | {retried.json()["task_id"]}
        assert len(following) == 1
        await until(http, following.pop(), status="SUCCEEDED")
        assert gpu.runs(retried.json()) == 1


async def test_a_redrive_takes_no_place_of_the_owner_and_is_not_refused_for_want_of_one(
    shop: Stand, ops: httpx.AsyncClient, gpu: PlayedGeneration, start: str
) -> None:
    headers = {"Authorization": f"Bearer {shop.keys['tight']}"}
    async with http_client(f"{shop.url}/api/v1", headers) as tight:
        dead = [await ended(tight, f"flaky {n}") for n in range(2)]
        held = [(await tight.post("/tasks", json={"prompt": f"hold {n}"})).json() for n in range(2)]
        refused = assert_problem(await tight.post("/tasks", json={"prompt": "more"}), 429, "TOO_MANY_PENDING_TASKS")
        before = (await tight.get("/usage")).json()["submissions"]["available"]
        await served(ops)
        await indexed(ops, dead, since=start)
        gpu.mended = True
        page = await redrive(ops, since=start, dry_run=False)
        assert page["counts"]["started"] == 2
        for item in page["items"]:
            request = await request_of(shop, item["new_task_id"])
            assert (request.redriven, request.places) == (True, ())
            await until(tight, item["new_task_id"], status="SUCCEEDED")
        usage = (await tight.get("/usage")).json()
        assert set(usage["pending"]["task_ids"]) == {task["task_id"] for task in held} == set(refused["task_ids"])  # type: ignore[call-overload]
        assert usage["submissions"]["available"] >= before
        for task in held:
            gpu.release(task)
            await until(tight, task["task_id"], status="SUCCEEDED")


async def test_what_would_fail_again_or_was_not_wanted_is_skipped_unless_it_is_named(
    shop: Stand, ops: httpx.AsyncClient, gpu: PlayedGeneration, start: str
) -> None:
    async with shop.user() as http:
        final = await ended(http, "fail now")
        canceled, terminated = [(await http.post("/tasks", json={"prompt": f"hold {n}"})).json() for n in range(2)]
        await until(http, canceled["task_id"], status="PROCESSING")
        await http.post(f"/tasks/{canceled['task_id']}/cancel", json={"mode": "hard"})
        await shop.client.get_workflow_handle(terminated["task_id"]).terminate()
        tasks = [final, canceled, terminated]
        for task in tasks:
            await until(http, task["task_id"], is_terminal=True)
        page = await indexed(ops, tasks, since=start)
        assert verdicts(page) == {task["task_id"]: "NOT_RETRYABLE" for task in tasks}
        assert page["counts"] == {"started": 0, "skipped": {"NOT_RETRYABLE": 3}}
        named = await redrive(ops, since=start, also=["INVALID_OUTPUT", "TERMINATED"])
        assert verdicts(named) == {
            final["task_id"]: "start",
            canceled["task_id"]: "NOT_RETRYABLE",
            terminated["task_id"]: "start",
        }
        gone = await http.delete(f"/tasks/{final['task_id']}")
        assert gone.status_code == 204


async def test_what_failed_again_after_a_redrive_is_left_unless_asked_for(
    shop: Stand, ops: httpx.AsyncClient, gpu: PlayedGeneration, start: str
) -> None:
    async with shop.user() as http:
        first = await ended(http, "flaky one")
        await served(ops)
        await indexed(ops, [first], since=start)
        [item] = (await redrive(ops, since=start, dry_run=False))["items"]
        second = await until(http, item["new_task_id"], status="FAILED")
        left = await indexed(ops, [first, second], since=start)
        assert verdicts(left) == {first["task_id"]: "RETRIED", second["task_id"]: "REDRIVEN"}
        again = await redrive(ops, since=start, again=True)
        assert verdicts(again) == {first["task_id"]: "RETRIED", second["task_id"]: "start"}
        # A retry by the owner is the owner's own: not held back.
        third = await until(
            http, (await http.post(f"/tasks/{second['task_id']}/retry")).json()["task_id"], status="FAILED"
        )
        assert verdicts(await indexed(ops, [third], since=start))[third["task_id"]] == "start"


async def test_pages_follow_each_other_and_a_query_narrows_them(
    shop: Stand, ops: httpx.AsyncClient, gpu: PlayedGeneration, start: str
) -> None:
    async with shop.user() as http:
        tasks = [await ended(http, f"flaky {n}") for n in range(4)] + [await ended(http, "fail now")]
        await indexed(ops, tasks, since=start)
        seen, cursor = [], None
        while True:
            page = await redrive(ops, since=start, limit=2, **({"cursor": cursor} if cursor else {}))
            assert len(page["items"]) <= 2
            seen += [item["task_id"] for item in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert sorted(seen) == sorted(task["task_id"] for task in tasks)
        one = await redrive(ops, since=start, query="ErrorCode = 'INVALID_OUTPUT'")
        assert [item["task_id"] for item in one["items"]] == [tasks[-1]["task_id"]]
        none = await redrive(ops, since=start, until=tasks[0]["created_at"])
        assert none["items"] == []
        # It leaves its brackets and finds workflows of other kinds, which are no tasks.
        wide = await redrive(ops, query="TaskStatus = 'NONE') OR (WorkflowType = 'AdmissionWorkflow'")
        assert (wide["items"], wide["matching"] > 0) == ([], True)


async def test_a_redrive_leaves_half_of_the_queue_to_users(shop: Stand, ops: httpx.AsyncClient, start: str) -> None:
    async with shop.user() as http:
        async with shop.gpu_worker():
            dead = [await ended(http, f"flaky {n}") for n in range(3)]
            await indexed(ops, dead, since=start)
        async with shop.gpu_worker(slots=1) as gpu:
            gpu.mended = True
            held = [(await http.post("/tasks", json={"prompt": f"hold {n}"})).json() for n in range(2)]
            await served(ops)
            async with asyncio.timeout(30):
                while (await ops.get("/queues")).json()["items"][0]["backlog"] != 1:
                    await asyncio.sleep(0.1)
            page = await redrive(ops, since=start, dry_run=False)
            # One waited, and three is half of six.
            assert page["counts"]["started"] == 2
            assert page["stopped"]["code"] == "QUEUE_FULL"
            assert page["stopped"]["retry_after_seconds"] >= 1
            assert page["next_cursor"] is None
            assert (await http.post("/tasks", json={"prompt": "a user's own"})).status_code == 202
            for task in held:
                gpu.release(task)
                await until(http, task["task_id"], status="SUCCEEDED")
            async with asyncio.timeout(30):
                while (page := await redrive(ops, since=start, dry_run=False))["stopped"] is not None:
                    await asyncio.sleep(0.2)
            assert page["counts"] == {"started": 1, "skipped": {"RETRIED": 2}}
            for item in page["items"]:
                await until(http, item["new_task_id"], status="SUCCEEDED")


async def test_the_command_says_what_it_would_do_and_does_it_in_batches_with_statistics(
    shop: Stand, ops: httpx.AsyncClient, gpu: PlayedGeneration, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_redrive, "BATCH", 2)
    async with shop.user() as http:
        tasks = [await ended(http, f"flaky {n}") for n in range(4)]
        await served(ops)
        await indexed(ops, tasks, since=start)
        code, planned, told = await command(shop, "--since", start, "--limit", "3")
        assert code == 0
        assert planned.count(" -> t") == 3
        assert "batch 1: 2 would be started" in told
        assert "batch 2: 1 would be started" in told
        assert "dry run: 3 of 3 tasks would be started; --yes starts them" in told
        gpu.mended = True
        code, _, told = await command(shop, "--since", start, "--limit", "3", "--yes")
        assert (code, "batch 2: 1 started" in told, "3 of 3 tasks started" in told) == (0, True, True)
        code, document, _ = await command(shop, "--since", start, "--yes", "--json")
        report = json.loads(document)
        assert (code, report["started"], report["skipped"]) == (0, 1, {"RETRIED": 3})
        for item in report["items"]:
            await until(http, item["new_task_id"], status="SUCCEEDED")


async def test_the_command_is_for_operators(shop: Stand) -> None:
    code, _, told = await command(shop, key="user")
    assert (code, "FORBIDDEN" in told) == (3, True)


@pytest.mark.parametrize(
    ("fields", "broken"),
    [
        ({"query": "ErrorCode ="}, {"query": "visibility_query"}),
        ({"query": "Nonsense = 'x'"}, {"query": "visibility_query"}),
        ({"query": "x" * 2_001}, {"query": "string_too_long"}),
        ({"limit": 51}, {"limit": "less_than_equal"}),
        ({"also": ["CANCELED"]}, {"also": "canceled"}),
        ({"also": ["NO_SUCH"]}, {"also.0": "enum"}),
        ({"since": "yesterday"}, {"since": "rfc3339"}),
        ({"since": "2026-01-31T12:00:00Z", "until": "2026-01-31T11:00:00Z"}, {"until": "after_since"}),
        ({"cursor": "bWFkZSB1cA=="}, {"cursor": "cursor"}),
        ({"dry_run": "no"}, {"dry_run": "bool_type"}),
        ({"force": True}, {"force": "extra_forbidden"}),
    ],
)
async def test_broken_rules_are_named(
    ops: httpx.AsyncClient, fields: dict[str, object], broken: dict[str, str]
) -> None:
    assert_problem(await ops.post("/redrive", json=fields), 422, "VALIDATION_FAILED", **broken)
