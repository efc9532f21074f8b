"""Quotas through the API, exact over two real API processes that share nothing but Temporal and the data folder."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio
from temporalio.client import WorkflowHandle
from temporalio.testing import WorkflowEnvironment
from typer.testing import CliRunner

from activities.storage import ObjectStore
from api.admission import TierAdmission
from api.auth import Caller
from api.backlog import Backlog
from api.cli import app
from api.cli_output import EXIT_REFUSED, CommandError
from api.fleet import Fleet
from api.images import InputImage
from api.intake import Intake
from api.jobs import Jobs
from api.problems import StorageUnavailableError
from api.queue_statistics import Queues
from api.quota import read_usage
from tests.api.api_processes import ApiProcess
from tests.api.stand import PlayedGeneration, Stand, api_settings, create_keys, http_client, open_stand, until
from tests.workflows.jobs import PARAMETERS, plan
from workers.connection import connect
from workers.devserver import server_args, temporal_binary
from workers.keys import KeyRing, Scope
from workers.keys_admin import create_key
from workers.registry import catalogue
from workflows import naming
from workflows.tasks import User

TIERS = {
    "standard": {"max_pending_tasks": 3, "submit_burst": 200},
    "slow": {"submit_rate_per_minute": 0.5, "submit_burst": 2, "fairness_weight": 3.0},
    "team": {"max_pending_tasks": 3, "tenant_max_pending_tasks": 4},
    "metered": {"allowance_tasks": 2, "allowance_gpu_seconds": 100.0},
    "free": {"max_priority": "low"},
}
SERVICES = {tier: f"{tier}-house" for tier in TIERS}


@dataclass(kw_only=True)
class Gates:
    """Two API processes with everything behind them."""

    urls: Sequence[str]
    stand: Stand
    played: PlayedGeneration

    @asynccontextmanager
    async def user(self, tier: str = "standard", name: str | None = None) -> AsyncIterator[EndUser]:
        """One end user of a service key, a new one by default."""
        name = name or f"user-{uuid4().hex[:12]}"
        headers = {"Authorization": f"Bearer {self.stand.keys[tier]}", "X-User-Id": name}
        async with (
            http_client(f"{self.urls[0]}/api/v1", headers) as first,
            http_client(f"{self.urls[1]}/api/v1", headers) as second,
        ):
            yield EndUser(doors=(first, second), user=User(tenant=SERVICES[tier], end_user=name))

    def admission(self, user: User, *, tenant: bool = False) -> WorkflowHandle[Any, Any]:
        name = naming.tenant_admission_id(user.tenant) if tenant else naming.admission_id(user)
        return self.stand.client.get_workflow_handle(name)

    async def events(self, user: User, *, tenant: bool = False) -> int:
        """Events in the history of an admission."""
        return (await self.admission(user, tenant=tenant).describe()).history_length


@dataclass(kw_only=True)
class EndUser:
    """Submits through both doors in turn."""

    doors: tuple[httpx.AsyncClient, httpx.AsyncClient]
    user: User

    @property
    def http(self) -> httpx.AsyncClient:
        return self.doors[0]

    async def submit(self, prompt: str, *, door: int = 0, **fields: object) -> httpx.Response:
        return await self.doors[door % 2].post("/tasks", json={"prompt": prompt, **fields})

    async def submit_all(self, prompts: Sequence[str]) -> list[httpx.Response]:
        return await asyncio.gather(*(self.submit(prompt, door=n) for n, prompt in enumerate(prompts)))

    async def usage(self) -> dict[str, Any]:
        reply = await self.http.get("/usage")
        assert reply.status_code == 200, reply.text
        usage: dict[str, Any] = reply.json()
        return usage

    async def pending(self, expected: int) -> None:
        """Wait for releases that are on their way."""
        async with asyncio.timeout(30):
            while (await self.usage())["pending"]["used"] != expected:
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module")
async def gates(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gates]:
    folder = tmp_path_factory.mktemp("gates")
    env = await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(),
        dev_server_extra_args=server_args(),
        dev_server_log_level="error",
    )
    async with env:
        address = env.client.service_client.config.target_host
        settings = api_settings(folder, address, 1, tiers=TIERS, submit_burst=20)
        keys = create_keys(settings) | {
            tier: create_key(settings.keys_file, tenant=tenant, scope=Scope.SERVICE, tier=tier).token
            for tier, tenant in SERVICES.items()
        }
        client = await connect(settings, register_search_attributes=True)
        with ApiProcess(settings, folder / "api-1") as first, ApiProcess(settings, folder / "api-2") as second:
            for process in (first, second):
                await asyncio.to_thread(process.until_ready)
            stand = open_stand(folder, first.url, settings, client, keys)
            async with stand.workers() as played:
                yield Gates(urls=(first.url, second.url), stand=stand, played=played)


def codes(replies: Sequence[httpx.Response]) -> Counter[int]:
    return Counter(reply.status_code for reply in replies)


def accepted(replies: Sequence[httpx.Response]) -> list[dict[str, Any]]:
    return [reply.json() for reply in replies if reply.status_code == 202]


@pytest.mark.timeout(120)
async def test_first_submissions_of_many_users_at_the_same_time_are_all_taken(gates: Gates) -> None:
    headers = {"Authorization": f"Bearer {gates.stand.keys['standard']}"}
    async with http_client(f"{gates.urls[0]}/api/v1", headers) as http:
        replies = await asyncio.gather(
            *(
                http.post("/tasks", json={"prompt": "one of many"}, headers={"X-User-Id": f"user-{uuid4().hex}"})
                for _ in range(24)
            )
        )
    assert codes(replies) == {202: 24}


class TestPlaces:
    async def test_fifty_equal_submissions_through_two_processes_are_one_task_one_run_one_token(
        self, gates: Gates
    ) -> None:
        async with gates.user() as user:
            replies = await user.submit_all(["hold the same"] * 50)
            assert set(codes(replies)) <= {200, 202}
            assert len({reply.json()["task_id"] for reply in replies}) == 1
            task = replies[0].json()
            await until(user.http, task["task_id"], status="PROCESSING")
            usage = await user.usage()
            assert usage["pending"] == {"limit": 3, "used": 1, "task_ids": [task["task_id"]]}
            assert 199 <= usage["submissions"]["available"] <= 200
            gates.played.release(task)
            await until(user.http, task["task_id"], status="SUCCEEDED")
            assert gates.played.runs(task) == 1
            await user.pending(0)

    async def test_forty_different_submissions_through_two_processes_get_exactly_the_places_there_are(
        self, gates: Gates
    ) -> None:
        async with gates.user() as user:
            replies = await user.submit_all([f"hold {number}" for number in range(40)])
            assert codes(replies) == {202: 3, 429: 37}
            tasks = accepted(replies)
            for reply in replies:
                if reply.status_code == 429:
                    problem = reply.json()
                    assert problem["code"] == "TOO_MANY_PENDING_TASKS"
                    assert set(problem["task_ids"]) == {task["task_id"] for task in tasks}
                    assert int(reply.headers["retry-after"]) >= 1
            gates.played.release(tasks[0])
            await until(user.http, tasks[0]["task_id"], status="SUCCEEDED")
            await user.pending(2)
            replies = await user.submit_all([f"hold again {number}" for number in range(10)])
            assert codes(replies) == {202: 1, 429: 9}

    async def test_a_refused_flood_leaves_no_event_and_no_task(self, gates: Gates) -> None:
        async with gates.user() as user:
            await user.submit_all([f"hold {number}" for number in range(3)])
            before = await gates.events(user.user)
            replies = await user.submit_all([f"hold more {number}" for number in range(40)])
            assert codes(replies) == {429: 40}
            assert await gates.events(user.user) == before
            mine = f"WorkflowType = 'GenerationWorkflow' AND UserId = '{naming.user_hash(user.user)}'"
            async with asyncio.timeout(30):
                while (await gates.stand.client.count_workflows(mine)).count != 3:
                    await asyncio.sleep(0.05)

    async def test_a_repetition_at_a_process_that_never_saw_it_is_answered_whatever_the_limits(
        self, gates: Gates
    ) -> None:
        async with gates.user() as user:
            ended, *_ = [(await user.submit(f"hold {number}")).json() for number in range(3)]
            gates.played.release(ended)
            await until(user.http, ended["task_id"], status="SUCCEEDED")
            await user.pending(2)
            assert (await user.submit("hold the last place")).status_code == 202
            before = await gates.events(user.user)
            repeated = await user.submit("hold 0", door=1)
            assert (repeated.status_code, repeated.json()["task_id"]) == (200, ended["task_id"])
            assert await gates.events(user.user) == before

    async def test_a_repetition_at_a_process_that_never_saw_it_keeps_no_place_and_no_token(self, gates: Gates) -> None:
        async with gates.user("slow") as user:
            ended = (await user.submit("hold this")).json()
            gates.played.release(ended)
            await until(user.http, ended["task_id"], status="SUCCEEDED")
            await user.pending(0)
            repeated = await user.submit("hold this", door=1)
            assert (repeated.status_code, repeated.json()["task_id"]) == (200, ended["task_id"])
            await user.pending(0)
            assert 1 <= (await user.usage())["submissions"]["available"] < 2
            before = await gates.events(user.user)
            assert (await user.submit("hold this", door=1)).status_code == 200
            assert await gates.events(user.user) == before

    async def test_a_task_terminated_by_an_operator_frees_its_place_when_it_is_wanted(self, gates: Gates) -> None:
        async with gates.user() as user:
            tasks = accepted(await user.submit_all([f"hold {number}" for number in range(3)]))
            await gates.stand.client.get_workflow_handle(tasks[1]["task_id"]).terminate("from the command line")
            assert (await user.submit("hold another")).status_code == 202
            assert (await user.submit("hold yet another")).status_code == 429

    async def test_a_cancelled_task_frees_its_place(self, gates: Gates) -> None:
        async with gates.user() as user:
            tasks = accepted(await user.submit_all([f"hold {number}" for number in range(3)]))
            await user.http.post(f"/tasks/{tasks[0]['task_id']}/cancel", json={"mode": "hard"})
            await user.pending(2)

    async def test_end_users_of_one_key_neither_see_nor_limit_each_other(self, gates: Gates) -> None:
        async with gates.user() as greedy, gates.user() as modest:
            tasks = accepted(await greedy.submit_all([f"hold {number}" for number in range(10)]))
            assert len(tasks) == 3
            usage = await modest.usage()
            assert (usage["pending"]["used"], usage["pending"]["task_ids"]) == (0, [])
            assert usage["submissions"]["available"] == 200
            assert usage["tenant_pending"] is None
            assert (await modest.submit("hold 0")).status_code == 202
            for task in tasks:
                assert (await modest.http.get(f"/tasks/{task['task_id']}")).status_code == 404

    async def test_an_image_that_cannot_be_stored_gives_place_and_token_back(
        self, gates: Gates, tmp_path: Path
    ) -> None:
        # A file where the folder of the images should be.
        (tmp_path / "inputs").touch()
        stand, user = gates.stand, User(tenant=SERVICES["slow"], end_user=f"user-{uuid4().hex[:12]}")
        queues = Queues(
            stand.client, fleet=Fleet(stand.client, heartbeat=timedelta(seconds=1)), catalogue=catalogue(stand.settings)
        )
        intake = Intake(
            jobs=Jobs(stand.client, call_limit=timedelta(seconds=3)),
            store=ObjectStore.from_url(tmp_path.as_uri()),
            admission=TierAdmission(stand.client, settings=stand.settings, queues=queues),
            backlog=Backlog(queues, max_backlog=10),
        )
        parameters = replace(PARAMETERS, image_key=naming.input_key(user, "0"))
        request = plan(user=user, pool="default", parameters=parameters)
        image = InputImage(content=b"x", sha256="0", media_type="image/png", width=1, height=1)
        key = KeyRing(stand.settings.keys_file).authenticate(stand.keys["slow"])
        assert key is not None
        with pytest.raises(StorageUnavailableError):
            await intake.start(Caller(key=key, end_user=user.end_user), request, image)
        usage = await read_usage(stand.client, user)
        assert usage.held == ()
        assert usage.tokens == pytest.approx(2.0)


class TestRates:
    async def test_repeats_of_a_task_cost_no_token_and_new_ones_do(self, gates: Gates) -> None:
        async with gates.user("slow") as user:
            first = await user.submit("hold a")
            repeats = await user.submit_all(["hold a"] * 10)
            assert (first.status_code, codes(repeats)) == (202, {200: 10})
            assert (await user.submit("hold b")).status_code == 202
            before = await gates.events(user.user)
            refused = await user.submit("hold c")
            assert (refused.status_code, refused.json()["code"]) == (429, "RATE_LIMITED")
            assert 60 < int(refused.headers["retry-after"]) <= 120
            assert await gates.events(user.user) == before
            usage = await user.usage()
            assert usage["submissions"]["burst"] == 2
            assert usage["submissions"]["available"] < 1
            assert usage["pending"]["used"] == 2

    async def test_the_allowance_runs_out_and_an_operator_resets_it(self, gates: Gates) -> None:
        async with gates.user("metered") as user, http_client(f"{gates.urls[1]}/api/v1") as operator:
            for number in range(2):
                task = (await user.submit(f"clip {number}")).json()
                await until(user.http, task["task_id"], status="SUCCEEDED")
                await user.pending(0)
            refused = await user.submit("one more")
            assert (refused.status_code, refused.json()["code"]) == (429, "QUOTA_EXHAUSTED")
            usage = await user.usage()
            assert (usage["used"]["tasks"], usage["used"]["gpu_seconds"]) == (2, 3.0)
            assert (usage["allowance"]["tasks"], usage["allowance"]["gpu_seconds"]) == (2, 100.0)
            account = {"tenant": user.user.tenant, "end_user": user.user.end_user}
            forbidden = await user.http.post("/quota/reset", params=account)
            assert (forbidden.status_code, forbidden.json()["code"]) == (403, "FORBIDDEN")
            operator.headers["Authorization"] = f"Bearer {gates.stand.keys['operator']}"
            shown = (await operator.get("/quota", params=account)).json()
            assert (shown["pending"], shown["used"]["tasks"]) == (0, 2)
            assert (await operator.post("/quota/reset", params=account)).status_code == 204
            assert (await user.submit("one more")).status_code == 202

    async def test_without_an_allowance_the_gpu_seconds_of_the_day_are_told(self, gates: Gates) -> None:
        async with gates.user() as user:
            task = (await user.submit("clip")).json()
            await until(user.http, task["task_id"], status="SUCCEEDED")
            async with asyncio.timeout(30):
                while (usage := await user.usage())["used"]["tasks"] == 0:
                    await asyncio.sleep(0.5)
            assert (usage["used"]["tasks"], usage["used"]["gpu_seconds"], usage["allowance"]) == (1, 1.5, None)


class TestTenant:
    async def test_the_tenants_limit_stands_above_its_end_users(self, gates: Gates) -> None:
        async with gates.user("team") as first, gates.user("team") as second:
            tasks = accepted(await first.submit_all([f"hold {number}" for number in range(6)]))
            assert len(tasks) == 3
            before = await gates.events(first.user, tenant=True)
            assert codes(await first.submit_all([f"hold more {number}" for number in range(20)])) == {429: 20}
            assert await gates.events(first.user, tenant=True) == before
            replies = [await second.submit(f"hold {number}") for number in range(2)]
            assert codes(replies) == {202: 1, 429: 1}
            problem = replies[1].json()
            assert problem["code"] == "TOO_MANY_PENDING_TASKS"
            assert "task_ids" not in problem
            usage = await second.usage()
            assert usage["pending"]["used"] == 1
            assert usage["tenant_pending"] == {"limit": 4, "used": 4}
            gates.played.release(tasks[0])
            await until(first.http, tasks[0]["task_id"], status="SUCCEEDED")
            async with asyncio.timeout(30):
                while (await second.submit("hold 1")).status_code != 202:
                    await asyncio.sleep(0.1)


class TestTiers:
    async def test_a_priority_above_the_tiers_is_refused(self, gates: Gates) -> None:
        async with gates.user("free") as user:
            refused = await user.submit("clip", priority="normal")
            assert (refused.status_code, refused.json()["code"]) == (403, "PRIORITY_NOT_ALLOWED")
            assert (await user.submit("clip")).json()["priority"] == "low"
            assert (await user.usage())["tier"] == "free"

    async def test_a_job_carries_the_tiers_weight_and_its_users_fairness_key(self, gates: Gates) -> None:
        async with gates.user("slow") as user:
            task = (await user.submit("hold")).json()
            described = await gates.stand.client.get_workflow_handle(task["task_id"]).describe()
            priority = described.raw_description.workflow_execution_info.priority
            assert (priority.fairness_weight, priority.fairness_key) == (3.0, naming.user_hash(user.user))


class TestCommands:
    async def test_usage_and_quota_on_the_command_line(self, gates: Gates) -> None:
        async with gates.user() as user:
            task = (await user.submit("hold")).json()
            account = f"{user.user.tenant}/{user.user.end_user}"

            async def run(*arguments: str, key: str = "operator") -> tuple[int, str]:
                environment = {"REELGATE_URL": gates.urls[0], "REELGATE_API_KEY": gates.stand.keys[key]}
                done = await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=environment)
                problem = done.exception
                return (
                    (problem.code, str(problem)) if isinstance(problem, CommandError) else (done.exit_code, done.output)
                )

            shown = await run("quota", "show", account)
            assert shown[0] == 0
            assert task["task_id"] in shown[1]
            assert (await run("quota", "reset", user.user.tenant, "--shared"))[0] == 0
            usage = await run("usage", key="user")
            assert usage[0] == 0
            assert "0 of 3" in usage[1]
            refused = await run("quota", "show", account, key="user")
            assert refused[0] == EXIT_REFUSED
            assert "FORBIDDEN" in refused[1]
