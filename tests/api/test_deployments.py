"""`reelgate deploy` against real versioned workers: what it shows, what it changes, what it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
import pytest_asyncio
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker, WorkerDeploymentConfig
from typer.testing import CliRunner

from activities.deployments import (
    DeploymentNotFoundError,
    DeploymentRefusedError,
    DeploymentSilentError,
    WorkerDeployment,
)
from activities.rollout import RolloutSteps
from api.cli import app
from api.deployments import Releases, VersionState, queue_of
from api.rollouts import NoRolloutError, RolloutError, Rollouts
from tests.api.forked_commands import forked_reelgate
from tests.cli.stack import clean_environment
from workers.codec import create_key_file
from workers.connection import connect
from workers.devserver import server_args, temporal_binary
from workers.settings import Settings
from workflows.naming import CONTROL_QUEUE, deployment_name, gpu_queue
from workflows.rollout import RolloutWorkflow
from workflows.rollouts import RolloutInput

HEARTBEAT = timedelta(seconds=1)
PATIENCE = timedelta(seconds=60)
"""The server takes a second or two for each change of a deployment, and longer beside other tests."""
DRAINS_QUICKLY = (
    ("matching.wv.VersionDrainageStatusVisibilityGracePeriod", "1s"),
    ("matching.wv.VersionDrainageStatusRefreshInterval", "1s"),
)
"""Three minutes each by default."""


@workflow.defn(name="OneActivityWorkflow", sandboxed=False)
class OneActivityWorkflow:
    """Runs an activity on a pool's queue, as a task does."""

    @workflow.run
    async def run(self, queue: str) -> str:
        result: str = await workflow.execute_activity(
            "version", task_queue=queue, start_to_close_timeout=timedelta(seconds=60), result_type=str
        )
        return result


@dataclass
class Bench:
    """A namespace with a pool of its own."""

    client: Client
    settings: Settings
    pool: str

    @property
    def queue(self) -> str:
        return gpu_queue(self.pool)

    @asynccontextmanager
    async def version(self, build_id: str, *, held: asyncio.Event | None = None) -> AsyncIterator[None]:
        """A worker of a version of the pool. With `held` its activities wait for that."""

        @activity.defn(name="version")
        async def version() -> str:
            if held is not None:
                await held.wait()
            return build_id

        async with Worker(
            self.client,
            task_queue=self.queue,
            activities=[version],
            graceful_shutdown_timeout=timedelta(seconds=30),
            deployment_config=WorkerDeploymentConfig(
                version=WorkerDeploymentVersion(deployment_name=deployment_name(self.queue), build_id=build_id),
                use_worker_versioning=True,
                default_versioning_behavior=VersioningBehavior.AUTO_UPGRADE,
            ),
        ):
            await self.until_known(build_id)
            yield

    async def until_known(self, build_id: str) -> None:
        deployment = WorkerDeployment(self.client, self.queue)
        async with asyncio.timeout(30):
            while True:
                try:
                    if build_id in (await deployment.routing()).drainage and build_id in await deployment.pollers():
                        return
                except DeploymentNotFoundError:
                    pass
                await asyncio.sleep(0.05)

    @property
    def releases(self) -> Releases:
        return Releases(self.client, heartbeat=HEARTBEAT)

    async def run(self) -> str:
        """The version that a new task gets."""
        return await self.client.execute_workflow(
            OneActivityWorkflow.run, self.queue, id=f"one-{uuid4().hex}", task_queue=CONTROL_QUEUE
        )

    async def until_run_by(self, build_id: str) -> None:
        """Wait until new tasks go to a version: a change takes a moment to reach the queues."""
        async with asyncio.timeout(20):
            while await self.run() != build_id:
                await asyncio.sleep(0.1)

    def reelgate(self, *arguments: str) -> tuple[int, str]:
        """Run `reelgate deploy ...`; exit code and output."""
        done = forked_reelgate(
            "deploy",
            *arguments,
            environment=clean_environment(
                REELGATE_DATA_DIR=str(self.settings.data_dir),
                REELGATE_TEMPORAL_ADDRESS=self.settings.temporal_address,
                REELGATE_WORKER_HEARTBEAT_SECONDS="1",
                COLUMNS="160",
            ),
        )
        return done.returncode, done.stdout + done.stderr

    async def command(self, *arguments: str, code: int = 0) -> str:
        found, said = await asyncio.to_thread(self.reelgate, *arguments)
        assert found == code, said
        return said

    async def have_current(self, build_id: str) -> None:
        """Make a version the current one if it is not, whoever polls; nothing ramps."""
        routing = await WorkerDeployment(self.client, self.queue).routing()
        if routing.ramping is not None:
            await self.releases.ramp(self.queue, routing.ramping, 0)
        if routing.current != build_id:
            await self.releases.make_current(self.queue, build_id, without_workers=True)

    async def versions(self) -> dict[str, VersionState]:
        """What `deploy status` shows of the pool, by build id."""
        return {version.build_id: version for version in (await self.releases.state(self.queue)).versions}


@pytest_asyncio.fixture(scope="module")
async def namespace(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Client, Settings]]:
    folder: Path = tmp_path_factory.mktemp("deployments")
    more = [part for key, value in DRAINS_QUICKLY for part in ("--dynamic-config-value", f'{key}="{value}"')]
    env = await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(),
        dev_server_extra_args=[*server_args(), *more],
        dev_server_log_level="never",
    )
    async with env:
        settings = Settings(
            data_dir=folder,
            temporal_address=env.client.service_client.config.target_host,
            worker_heartbeat_seconds=1,
        )
        create_key_file(settings.codec_key_file)
        client = await connect(settings, register_search_attributes=True)
        steps = RolloutSteps(client)
        async with Worker(
            client,
            task_queue=CONTROL_QUEUE,
            workflows=[OneActivityWorkflow, RolloutWorkflow],
            activities=[
                steps.begin_rollout,
                steps.set_canary_share,
                steps.observe_rollout,
                steps.settle_rollout,
            ],
        ):
            yield client, settings


@pytest.fixture
def bench(namespace: tuple[Client, Settings]) -> Bench:
    client, settings = namespace
    return Bench(client=client, settings=settings, pool=f"p{uuid4().hex[:8]}")


@pytest_asyncio.fixture(scope="module")
async def pair(namespace: tuple[Client, Settings]) -> AsyncIterator[Bench]:
    """A pool with workers of the versions 1 and 2, for all tests that leave the versions as they are."""
    client, settings = namespace
    bench = Bench(client=client, settings=settings, pool=f"p{uuid4().hex[:8]}")
    async with AsyncExitStack() as stack:
        for build_id in ("1", "2"):
            await stack.enter_async_context(bench.version(build_id))
        yield bench


async def test_a_version_gets_work_once_it_is_current_and_its_share_once_it_ramps(bench: Bench) -> None:
    async with bench.version("1"), bench.version("2"):
        waiting = asyncio.create_task(bench.run())
        roles = {version.build_id: version.role for version in (await bench.versions()).values()}
        assert roles == {"1": "idle", "2": "idle", "": "current"}
        assert "1 is the current version" in await bench.command("current", bench.queue, "1")
        assert await waiting == "1"
        await bench.command("ramp", f"reelgate-{bench.queue}", "2", "100")
        await bench.until_run_by("2")
        versions = await bench.versions()
        assert (versions["1"].role, versions["1"].percentage) == ("current", 0.0)
        assert (versions["2"].role, versions["2"].percentage) == ("ramping", 100.0)
        assert versions["2"].workers == versions["2"].pollers == 1
        await bench.releases.ramp(bench.queue, "2", 0)
        await bench.until_run_by("1")
        assert bench.queue in await bench.command("status")
        (shown,) = json.loads(await bench.command("status", bench.queue, "--json"))["items"]
        assert {version["build_id"] for version in shown["versions"]} == {"1", "2"}


async def test_what_cannot_work_is_refused_with_the_reason(bench: Bench) -> None:
    with pytest.raises(DeploymentNotFoundError, match="no worker has polled"):
        await bench.releases.make_current(bench.queue, "1")
    async with bench.version("1"):
        await bench.releases.make_current(bench.queue, "1")
        assert "has no version 9; it has 1" in await bench.command("current", bench.queue, "9", code=3)
        for change in (bench.releases.ramp(bench.queue, "9", 5), bench.releases.retire(bench.queue, "9")):
            with pytest.raises(DeploymentNotFoundError, match="has no version 9; it has 1"):
                await change
        with pytest.raises(DeploymentRefusedError, match=r"current version of .* already"):
            await bench.releases.ramp(bench.queue, "1", 5)
        async with bench.version("2"):
            pass
        with pytest.raises(DeploymentRefusedError, match="no worker of 2 asks for work"):
            await bench.releases.ramp(bench.queue, "2", 5)
        with pytest.raises(DeploymentRefusedError, match="no worker of 2 asks for work"):
            await bench.releases.make_current(bench.queue, "2")
        with pytest.raises(DeploymentRefusedError, match="2 is not ramping"):
            await bench.releases.ramp(bench.queue, "2", 0)
        await bench.releases.make_current(bench.queue, "2", without_workers=True)
        assert (await bench.versions())["2"].role == "current"
    for arguments, complaint in (
        (("current", bench.queue), "give a BUILD_ID or --unversioned"),
        (("status", "gpu"), "'gpu' is no deployment"),
    ):
        # In this process: neither comes as far as a connection.
        done = CliRunner().invoke(app, ["deploy", *arguments], env={"COLUMNS": "160"})
        assert done.exit_code == 2
        assert complaint in done.output


async def test_a_version_that_holds_work_is_not_retired_and_one_that_holds_none_is(bench: Bench) -> None:
    held = asyncio.Event()
    async with bench.version("2"):
        async with bench.version("1", held=held):
            await bench.releases.make_current(bench.queue, "1")
            running = asyncio.create_task(bench.run())
            await refused(bench, "1", "runs 1 task")
            said = await bench.command("retire", bench.queue, "1", code=3)
            assert "gets 100 % of new tasks" in said
            assert "runs 1 task" in said
            await bench.releases.make_current(bench.queue, "2")
            said = await refused(bench, "1", "has 1 worker running, or seen a moment ago")
            assert "runs 1 task" in said
            asyncio.get_running_loop().call_later(2.5, held.set)
        # Its worker is gone, after the task that it had has ended.
        assert await running == "1"
        async with asyncio.timeout(60):
            while (version := (await bench.versions())["1"]).role == "draining" or version.workers or version.pollers:
                await asyncio.sleep(0.2)
        assert "1 of " in await bench.command("retire", bench.queue, "1")
        assert "1" not in await bench.versions()
        await bench.until_run_by("2")


async def refused(bench: Bench, build_id: str, reason: str) -> str:
    """Wait until the refusal names a reason: workers report themselves once a second."""
    async with asyncio.timeout(20):
        while True:
            with pytest.raises(DeploymentRefusedError) as error:
                await bench.releases.retire(bench.queue, build_id)
            if reason in str(error.value):
                return str(error.value)
            await asyncio.sleep(0.2)


async def test_two_who_change_a_deployment_at_once_do_not_overwrite_each_other(pair: Bench) -> None:
    await pair.have_current("2")
    deployment = WorkerDeployment(pair.client, pair.queue)
    seen = await deployment.routing()
    await deployment.set_current("1", token=seen.token)
    with pytest.raises(DeploymentRefusedError):
        await deployment.set_current("2", token=seen.token)
    assert (await deployment.routing()).current == "1"


async def test_unversioned_workers_can_be_made_current_again(pair: Bench) -> None:
    await pair.have_current("1")
    with pytest.raises(DeploymentRefusedError, match="no worker of unversioned"):
        await pair.releases.make_current(pair.queue, "")
    await pair.releases.make_current(pair.queue, "", without_workers=True)
    assert (await pair.versions())[""].role == "current"


async def test_a_server_that_is_silent_is_given_up_in_time(bench: Bench) -> None:
    deployment = WorkerDeployment(bench.client, bench.queue, call_limit=timedelta(milliseconds=1))
    with pytest.raises(DeploymentSilentError, match=r"did not answer within 0\.001 s"):
        await deployment.routing()


def test_deployments_are_named_by_what_their_workers_poll() -> None:
    assert [queue_of(name) for name in ("control", "reelgate-callback", "gpu-default")] == [
        "control",
        "callback",
        "gpu-default",
    ]
    for wrong in ("", "gpu", "gpu-", "default", "reelgate-"):
        with pytest.raises(ValueError, match="is no deployment"):
            queue_of(wrong)


async def why_not(bench: Bench, build_id: str, reason: str) -> None:
    with pytest.raises(RolloutError, match=reason):
        await Rollouts(bench.client).start(RolloutInput(pool=bench.pool, canary=build_id))


class TestRollouts:
    async def test_one_that_cannot_begin_says_why(self, pair: Bench) -> None:
        start = ("rollout", "start", f"{pair.pool}-other")
        assert "no versioned worker of pool" in await pair.command(*start, "2", code=3)
        await pair.have_current("")
        await why_not(pair, "2", "has no current version to compare with")
        await pair.releases.make_current(pair.queue, "1")
        await why_not(pair, "1", "'1' is the current version")
        await why_not(pair, "9", "has no version '9'")
        async with pair.version("3"):
            await pair.releases.ramp(pair.queue, "3", 10)
            await why_not(pair, "2", "'3' is ramping")

    async def test_an_abort_takes_the_share_away(self, pair: Bench) -> None:
        await pair.have_current("1")
        rollouts = Rollouts(pair.client)
        await rollouts.start(RolloutInput(pool=pair.pool, canary="2"))
        await rollouts.steer(pair.pool, "abort")
        ended = await rollouts.until_ended(pair.pool, limit=PATIENCE)
        assert ended.record is not None
        assert ended.record.phase == "ABORTED"
        assert (await WorkerDeployment(pair.client, pair.queue).routing()).ramping is None

    async def test_a_change_by_hand_ends_it_without_touching_the_deployment(self, pair: Bench) -> None:
        await pair.have_current("1")
        rollouts = Rollouts(pair.client)
        await rollouts.start(RolloutInput(pool=pair.pool, canary="2", look_seconds=0.2))
        await pair.releases.ramp(pair.queue, "2", 0)
        reading = await rollouts.until_ended(pair.pool, limit=PATIENCE)
        assert reading.record is not None
        assert reading.record.phase == "SUPERSEDED"

    async def test_one_that_was_terminated_says_that_the_share_stays(self, pair: Bench) -> None:
        await pair.have_current("1")
        rollouts = Rollouts(pair.client)
        await rollouts.start(RolloutInput(pool=pair.pool, canary="2"))
        await pair.client.get_workflow_handle(f"rollout-{pair.pool}").terminate()
        said = await pair.command("rollout", "status", pair.pool)
        assert "ended from outside (TERMINATED): the share stays" in said
        with pytest.raises(NoRolloutError):
            await rollouts.steer(pair.pool, "pause")
        # A new one takes it up.
        await rollouts.start(RolloutInput(pool=pair.pool, canary="2"))
        await rollouts.steer(pair.pool, "abort")
        with pytest.raises(RolloutError):
            await rollouts.steer(f"{pair.pool}-other", "abort")
        # The next test has the pool for itself.
        await rollouts.until_ended(pair.pool, limit=PATIENCE)

    async def test_it_is_steered_by_command(self, pair: Bench) -> None:
        await pair.have_current("1")
        rollouts = Rollouts(pair.client)
        with pytest.raises(NoRolloutError, match="has no rollout"):
            await rollouts.read(f"{pair.pool}-none")
        said = await pair.command("rollout", "start", pair.pool, "2", "--percent", "20")
        assert f"2 against 1 in pool {pair.pool}: OBSERVING" in said
        assert (await pair.versions())["2"].percentage == 20.0
        with pytest.raises(RolloutError, match="not over"):
            await rollouts.start(RolloutInput(pool=pair.pool, canary="2"))
        await pair.command("rollout", "pause", pair.pool)
        async with asyncio.timeout(20):
            while (await pair.versions())["2"].percentage != 0.0:
                await asyncio.sleep(0.1)
        assert (await pair.versions())["2"].role == "ramping"
        await rollouts.steer(pair.pool, "resume")
        assert f"2 against 1 in pool {pair.pool}: " in await pair.command("rollout", "promote", pair.pool)
        await rollouts.until_ended(pair.pool, limit=PATIENCE)
        assert (await pair.versions())["2"].role == "current"
        with pytest.raises(NoRolloutError, match="no rollout that runs"):
            await rollouts.steer(pair.pool, "pause")
        record = json.loads(await pair.command("rollout", "status", pair.pool, "--json"))
        assert [d["action"] for d in record["decisions"]] == ["ramp", "pause", "resume", "promote"]
        assert (record["open"], record["phase"]) == (False, "PROMOTED")
