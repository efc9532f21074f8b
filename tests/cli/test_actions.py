"""`reelgate retry`, `delete`, `timeline`, `callbacks` and `replay`, against a running gateway."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio
import structlog
import typer
from temporalio import workflow
from temporalio.worker import UnsandboxedWorkflowRunner, Worker
from typer.testing import CliRunner, Result

from activities.callbacks import CallbackDelivery
from api.cli import app
from api.cli_callbacks import moment
from api.cli_output import EXIT_REFUSED, CommandError
from api.cli_replay import EXIT_DIVERGED, replay_histories
from tests.api.conftest import running_stand
from tests.api.stand import PlayedGeneration, Stand, http_client, until
from tests.cli.stack import clean_environment, reelgate
from tests.receiver import Receiver, respond
from tests.workflows.jobs import plan
from workers.links import links_from
from workers.registry import guarded_client, key_ring
from workflows import naming
from workflows.tasks import GenerationInput


@dataclass(kw_only=True)
class Desk:
    """A gateway, and its commands with a user's key."""

    stand: Stand
    played: PlayedGeneration
    http: httpx.AsyncClient

    async def run(self, *arguments: str, answer: str | None = None, **more: str) -> Result:
        """Run one command in a thread; the gateway's workers run in this one. `more` is environment."""
        environment = {"REELGATE_URL": self.stand.url, "REELGATE_API_KEY": self.stand.keys["user"], **more}

        def invoke() -> Result:
            return CliRunner().invoke(app, list(arguments), input=answer, env=environment)

        return await asyncio.to_thread(invoke)

    async def ended(self, prompt: str, **fields: object) -> str:
        """The id of a task that has ended."""
        task: dict[str, Any] = (await self.http.post("/tasks", json={"prompt": prompt, **fields})).json()
        await until(self.http, task["task_id"], is_terminal=True)
        return str(task["task_id"])


@pytest.fixture(scope="module", autouse=True)
def _quiet_logs() -> Iterator[None]:
    """The gateway runs in this process, and what is looked at is what the commands print."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


@pytest_asyncio.fixture(scope="module")
async def desk(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Desk]:
    async with running_stand(tmp_path_factory.mktemp("desk")) as stand, guarded_client(stand.settings) as client:
        keys = key_ring(stand.settings)
        delivery = CallbackDelivery(secrets=keys, endpoints=keys, links=links_from(stand.settings), client=client)
        headers = {"Authorization": f"Bearer {stand.keys['user']}"}
        async with (
            stand.workers(delivery=delivery) as played,
            http_client(f"{stand.url}/api/v1", headers) as http,
        ):
            yield Desk(stand=stand, played=played, http=http)
        await delivery.aclose()


async def test_retry_starts_the_next_task_and_says_when_there_is_one_already(desk: Desk) -> None:
    failed = await desk.ended("fail first")
    done = await desk.run("retry", failed)
    assert done.exit_code == 0, done.output
    assert "started:" in done.output
    started = re.search(r"task +(t\w{26})", done.output)
    assert started is not None
    assert started[1] != failed
    held = (await desk.http.post("/tasks", json={"prompt": "hold me"})).json()["task_id"]
    refused = await desk.run("retry", held)
    assert "TASK_NOT_TERMINAL" in str(refused.exception)
    task = json.loads((await desk.run("retry", failed, "--json")).output)
    assert task["retry_of"] in (failed, started[1])
    await desk.run("delete", held, "--yes")


async def test_timeline_shows_states_and_attempts(desk: Desk) -> None:
    task_id = await desk.ended("drain once")
    shown = (await desk.run("timeline", task_id)).output
    assert [line.split()[0] for line in shown.splitlines()[2:7]] == [
        *("QUEUED", "PROCESSING", "QUEUED", "PROCESSING", "SUCCEEDED")
    ]
    assert re.search(r"1 +ended +host/cpu:0 +test .*WORKER_SHUTDOWN", shown)
    assert re.search(r"2 +published +host/cpu:0 +test ", shown)
    document = json.loads((await desk.run("timeline", task_id, "--json")).output)
    assert [attempt["reason"] for attempt in document["attempts"]] == ["WORKER_SHUTDOWN", None]


async def test_delete_asks_first(desk: Desk) -> None:
    task_id = await desk.ended("a clip")
    kept = await desk.run("delete", task_id, answer="n\n")
    assert kept.exit_code == 1
    assert (await desk.http.get(f"/tasks/{task_id}")).status_code == 200
    done = await desk.run("delete", task_id, answer="y\n")
    assert (done.exit_code, f"deleted {task_id}" in done.output) == (0, True)
    assert (await desk.http.get(f"/tasks/{task_id}")).status_code == 404
    assert "TASK_NOT_FOUND" in str((await desk.run("delete", task_id, "--yes")).exception)


async def test_callbacks_are_shown_and_sent_again(desk: Desk) -> None:
    async with Receiver() as receiver:
        receiver.script(respond(410, "gone fishing"))
        task_id = await desk.ended("with callback", callback_url=receiver.url)
        await until(desk.http, task_id, callback_status="FAILED")
        shown = (await desk.run("callbacks", "show", task_id)).output
        assert f"to      {receiver.url}" in shown
        assert "callback: FAILED" in shown
        assert re.search(r"1 .* 410 +GONE +gone fishing", shown)
        assert '"type":"task.succeeded"' in shown
        done = await desk.run("callbacks", "redeliver", task_id)
        assert "redelivery 1: " in done.output
        await receiver.wait_for(2)


async def test_callbacks_of_a_time_are_sent_again_after_a_question(desk: Desk) -> None:
    async with Receiver() as receiver:
        receiver.script(respond(410), respond(410))
        tasks = {await desk.ended(f"range {n}", callback_url=receiver.url_of("/range")) for n in range(2)}
        for task_id in tasks:
            await until(desk.http, task_id, callback_status="FAILED")
        for _ in range(100):
            asked = await desk.run("callbacks", "redeliver", "--since", "1h", "--failed-only", answer="n\n")
            if all(f"{task_id}  FAILED  redeliver" in asked.output for task_id in tasks):
                break
        assert asked.exit_code == 1
        assert len(receiver.requests) == 2
        done = await desk.run("callbacks", "redeliver", "--since", "1h", "--failed-only", "--yes", "--json")
        assert done.exit_code == 0, done.output
        assert tasks <= {item["task_id"] for item in json.loads(done.output)["items"]}
        await receiver.wait_for(4)
    assert (await desk.run("callbacks", "redeliver")).exit_code == 2
    assert (await desk.run("callbacks", "redeliver", "t1", "--since", "1h")).exit_code == 2
    assert (await desk.run("callbacks", "redeliver", "--since", "noon")).exit_code == 2


async def test_callbacks_that_were_taken_are_sent_again_only_when_all_are_meant(desk: Desk) -> None:
    async with Receiver() as receiver:
        task_id = await desk.ended("taken", callback_url=receiver.url)
        await until(desk.http, task_id, callback_status="SUCCEEDED")
        for _ in range(200):
            planned = await desk.run("callbacks", "redeliver", "--since", "1h", "--all", "--json")
            plan = json.loads(planned.output)
            if task_id in {item["task_id"] for item in plan["items"]}:
                break
        assert plan["dry_run"] is True
        plan = json.loads((await desk.run("callbacks", "redeliver", "--since", "1h", "--json")).output)
        assert task_id not in {item["task_id"] for item in plan["items"]}
        assert len(receiver.requests) == 1, "nothing was sent again"


async def test_a_sample_shows_what_came_back(desk: Desk) -> None:
    async with Receiver() as receiver:
        receiver.script(respond(200, "thanks"), respond(500, "oh no"))
        fine = await desk.run("callbacks", "test", receiver.url)
        assert (fine.exit_code, "SUCCEEDED  200" in fine.output) == (0, True)
        broken = await desk.run("callbacks", "test", receiver.url)
        assert broken.exit_code == 1
        assert "FAILED  500" in broken.output
        assert "oh no" in broken.output


@pytest.mark.parametrize("text", ["", "h", "-2h", "2y", "yesterday", "2026-13-01"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        moment(text)


def test_times_are_ages_or_rfc_3339() -> None:
    assert moment("2026-01-31T12:00:00Z") == moment("2026-01-31T13:00:00+01:00") == moment("2026-01-31T12:00:00")
    assert moment("3d") < moment("2h") < moment("90m")


async def test_replay_of_a_task_and_its_callback_succeeds(desk: Desk) -> None:
    async with Receiver() as receiver:
        task_id = await desk.ended("replay me", callback_url=receiver.url)
        await until(desk.http, task_id, callback_status="SUCCEEDED")
    here = {
        "REELGATE_DATA_DIR": str(desk.stand.settings.data_dir),
        "REELGATE_TEMPORAL_ADDRESS": desk.stand.settings.temporal_address,
    }
    done = await asyncio.to_thread(reelgate, "replay", task_id, environment=clean_environment(**here))
    assert done.returncode == 0, done
    assert re.search(rf"^{task_id}: \d+ events replay$", done.stdout, re.MULTILINE)
    assert f"{naming.callback_id(task_id)}: " in done.stdout
    absent = (await desk.run("replay", "t" + "a" * 26, **here)).exception
    assert isinstance(absent, CommandError)
    assert absent.code == EXIT_REFUSED
    assert "no task" in str(absent)


@workflow.defn(name="GenerationWorkflow")
class OtherGeneration:
    """A job of another release, whose commands are not today's."""

    @workflow.run
    async def run(self, _plan: GenerationInput) -> None:
        await workflow.sleep(0.01)
        await workflow.sleep(0.01)


async def test_replay_names_the_command_that_diverged(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    task_id, queue = "t" + "b" * 26, "another-release"
    client = desk.stand.client
    async with Worker(
        client, task_queue=queue, workflows=[OtherGeneration], workflow_runner=UnsandboxedWorkflowRunner()
    ):
        await client.execute_workflow(OtherGeneration.run, plan(task_id=task_id), id=task_id, task_queue=queue)
    assert await replay_histories(client, task_id) == EXIT_DIVERGED
    said = capsys.readouterr().err
    assert f"{task_id}: diverged" in said
    assert "Nondeterminism" in said or "nondeterminism" in said
    assert "ctivity" in said, "it names the command"
