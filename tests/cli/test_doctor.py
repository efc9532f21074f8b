"""`reelgate doctor`: every broken thing is one line with its remedy, in bounded time, and the remedy mends it."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
import pytest_asyncio
from temporalio import activity
from temporalio.api.workflowservice.v1 import SetWorkerDeploymentCurrentVersionRequest
from temporalio.client import Client
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker, WorkerDeploymentConfig

from api.doctor import machine, server
from api.doctor.examination import examine, is_well
from api.doctor.findings import Finding, State
from tests.api.conftest import running_stand
from tests.api.stand import Stand, until
from tests.cli.stack import clean_environment, reelgate
from workers.codec import create_key_file
from workers.connection import process_runtime
from workers.devserver import free_port, temporal_binary
from workers.keys import Scope
from workers.keys_admin import create_key
from workers.settings import Settings

WEEK = "temporal operator namespace update --namespace default --retention 7d"


@dataclass(frozen=True)
class Ward:
    """A gateway whose workers all run."""

    stand: Stand
    settings: Settings

    async def broken(self, **changes: object) -> dict[str, Finding]:
        """What is broken with these settings, by name."""
        findings = await examine(self.settings.model_copy(update=changes))
        return {finding.name: finding for finding in findings if finding.state is State.BROKEN}


def carry_out(command: str, address: str) -> None:
    """Run a remedy as it was printed."""
    program, *arguments = shlex.split(command)
    assert program == "temporal"
    subprocess.run([temporal_binary(), *arguments, "--address", address], check=True, capture_output=True, timeout=30)


@pytest_asyncio.fixture(scope="module")
async def ward(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ward]:
    async with running_stand(tmp_path_factory.mktemp("ward")) as stand, stand.workers():
        opened = Ward(stand=stand, settings=stand.settings)
        async with asyncio.timeout(60):
            while "workers" in await opened.broken():
                await asyncio.sleep(0.3)  # They have not reported themselves yet.
        yield opened


@pytest_asyncio.fixture(scope="module")
async def plain() -> AsyncIterator[str]:
    """A server as it comes, without our dynamic configuration; its address."""
    env = await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(), dev_server_log_level="error"
    )
    async with env:
        yield env.client.service_client.config.target_host


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


async def test_a_short_retention_is_found_and_the_command_that_is_named_mends_it(ward: Ward) -> None:
    found = await ward.broken()
    assert list(found) == ["retention"], "all else is well"
    assert "keeps closed runs 1 days" in found["retention"].detail
    assert found["retention"].remedy == WEEK
    carry_out(found["retention"].remedy, ward.settings.temporal_address)
    assert await ward.broken() == {}
    assert "namespace default keeps closed runs 7 days" in str(await examine(ward.settings))


async def test_a_namespace_is_made_and_furnished_by_the_commands_that_are_named(ward: Ward) -> None:
    name = f"n{uuid4().hex[:8]}"
    missing = await ward.broken(namespace=name)
    assert list(missing) == ["namespace"]
    carry_out(missing["namespace"].remedy, ward.settings.temporal_address)
    async with asyncio.timeout(30):
        # A fresh namespace takes some seconds until every part of the server knows it.
        while "lacks search attributes" not in str(found := await ward.broken(namespace=name)):
            await asyncio.sleep(0.2)
    assert "retention" not in found
    async with asyncio.timeout(30):
        while "search attributes" in (found := await ward.broken(namespace=name)):
            await asyncio.to_thread(_try, found["search attributes"].remedy, ward.settings.temporal_address)
            await asyncio.sleep(0.2)
    assert {"workers"} == set(found), "nobody works there"


@activity.defn
async def nothing() -> None:
    """Never asked for."""


async def test_workers_of_a_version_that_gets_no_work_are_found(plain: str) -> None:
    settings = Settings(temporal_address=plain, worker_heartbeat_seconds=1)
    client = await Client.connect(plain, runtime=process_runtime(timedelta(seconds=1), None))
    version = WorkerDeploymentVersion(deployment_name="reelgate-callback", build_id="0.2.0")
    deployment = WorkerDeploymentConfig(
        version=version,
        use_worker_versioning=True,
        default_versioning_behavior=VersioningBehavior.AUTO_UPGRADE,
    )

    async def workers() -> str:
        findings = await server.temporal(settings)
        return str([f for f in findings if f.name == "workers" and "callback" in f.detail])

    async with Worker(client, task_queue="callback", activities=[nothing], deployment_config=deployment):
        async with asyncio.timeout(60):
            while "reelgate deploy current callback 0.2.0" not in await workers():
                await asyncio.sleep(0.2)
        request = SetWorkerDeploymentCurrentVersionRequest(
            namespace="default", deployment_name="reelgate-callback", build_id="0.2.0", ignore_missing_task_queues=True
        )
        await client.workflow_service.set_worker_deployment_current_version(request)
        async with asyncio.timeout(60):
            while "1 on callback" not in (said := await workers()) or "get no work" in said:
                await asyncio.sleep(0.2)


def _try(command: str, address: str) -> None:
    with suppress(subprocess.CalledProcessError):
        carry_out(command, address)


async def test_a_server_without_our_settings_is_told_what_it_lacks(ward: Ward, plain: str) -> None:
    found = await examine(ward.settings.model_copy(update={"temporal_address": plain}))
    text = [f"{f.name}: {f.detail} -- {f.remedy}" for f in found if f.state is State.BROKEN]
    assert any("gpu-default has 4 partitions" in line and "numTaskqueueReadPartitions" in line for line in text)
    assert any("set frontend.WorkerCommandsEnabled: true" in line for line in text)
    assert any("set frontend.enableCancelWorkerPollsOnShutdown: true" in line for line in text)
    for queue in ("control", "callback", "gpu-default"):
        assert any(f"none on {queue} " in line and "start one: reelgate worker" in line for line in text)


@pytest.mark.parametrize("how", ["refuses", "silent"])
async def test_a_server_that_does_not_answer_is_one_line_in_seconds(ward: Ward, silent: str, how: str) -> None:
    address = silent if how == "silent" else f"127.0.0.1:{free_port()}"
    began = time.monotonic()
    found = await ward.broken(temporal_address=address)
    assert list(found) == ["temporal"]
    assert address in found["temporal"].detail
    assert "tasks go on when it is back" in found["temporal"].remedy
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("what", ["not a folder", "no endpoint"])
async def test_a_store_that_does_not_take_anything_is_one_line_in_seconds(
    ward: Ward, tmp_path: Path, what: str
) -> None:
    url = f"file://{tmp_path}/store"
    options: dict[str, object] = {}
    if what == "not a folder":
        (tmp_path / "store").write_text("a file")
    else:
        url = "s3://clips/here"
        options = {
            "endpoint": f"http://127.0.0.1:{free_port()}",
            "allow_http": "true",
            "access_key_id": "reel",
            "secret_access_key": "gate-secret",
        }
    settings = Settings.model_validate({"store_url": url, "store_options": options})
    began = time.monotonic()
    found = await ward.broken(store_url=settings.store_url, store_options=settings.store_options)
    assert list(found) == ["store"]
    assert "gate-secret" not in str(found)
    assert time.monotonic() - began < 15


async def test_the_probe_of_the_store_leaves_nothing(ward: Ward) -> None:
    [finding] = await machine.store(ward.settings)
    assert finding.detail.endswith("written, read, deleted")
    assert not list((ward.settings.data_dir / "store").glob("doctor/*"))


async def test_each_missing_secret_is_a_line_of_its_own(ward: Ward, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    found = await ward.broken(keys_file=nowhere, codec_key_file=nowhere, link_secret_file=nowhere)
    assert set(found) == {"codec key", "link secret", "keys file"}
    assert all(finding.remedy for finding in found.values())


async def test_keys_of_unknown_tiers_and_a_missing_operator_are_said(ward: Ward, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    create_key(file, tenant="acme", scope=Scope.USER)
    findings = {f.name: f for f in await examine(ward.settings.model_copy(update={"keys_file": file}))}
    assert findings["keys file"].state is State.LOOK
    assert "--scope operator" in findings["keys file"].remedy
    create_key(file, tenant="acme", scope=Scope.OPERATOR, tier="golden")
    assert "golden" in (await ward.broken(keys_file=file))["keys file"].detail


async def test_a_payload_key_that_was_taken_away_too_early_is_found(ward: Ward, tmp_path: Path) -> None:
    async with ward.stand.user() as http:
        task = (await http.post("/tasks", json={"prompt": "fine"})).json()
        await until(http, task["task_id"], status="SUCCEEDED")
    old, new = ward.settings.codec_key_file.read_text(), tmp_path / "codec.keys"
    create_key_file(new)
    async with asyncio.timeout(30):
        while "payloads" not in (found := await ward.broken(codec_key_file=new)):
            await asyncio.sleep(0.1)  # The index lags.
    assert old.partition(":")[0] in found["payloads"].detail
    both = tmp_path / "both.keys"
    both.write_text(new.read_text() + old)
    both.chmod(0o600)
    assert "payloads" not in await ward.broken(codec_key_file=both)


@pytest.mark.parametrize("off", [-60, 60])
async def test_a_clock_that_is_off_is_found(ward: Ward, off: int) -> None:
    [finding] = await server.clock(ward.stand.client, now=lambda: time.time() + off)
    assert finding.state is State.BROKEN
    assert re.match(r"(59|60) s off", finding.detail)


async def test_another_torch_than_the_one_that_was_tried_is_found(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TORCH", "1.0.0")
    assert "torch==1.0.0" in (await ward.broken())["torch"].remedy


def test_a_wrong_setting_is_one_line(tmp_path: Path) -> None:
    environment = clean_environment(REELGATE_DATA_DIR=str(tmp_path), REELGATE_MAX_BACKLOG="0")
    done = reelgate("doctor", environment=environment)
    assert done.returncode == 1
    [line] = done.stdout.splitlines()
    assert line.startswith("broken  settings  REELGATE_MAX_BACKLOG: ")


async def test_the_command_prints_a_line_for_each_thing_and_its_exit_code_tells(ward: Ward) -> None:
    carry_out(WEEK, ward.settings.temporal_address)
    environment = clean_environment(
        REELGATE_DATA_DIR=str(ward.settings.data_dir),
        REELGATE_TEMPORAL_ADDRESS=ward.settings.temporal_address,
        REELGATE_TIERS=json.dumps({name: tier.model_dump(mode="json") for name, tier in ward.settings.tiers.items()}),
    )
    well = await asyncio.to_thread(reelgate, "doctor", environment=environment)
    assert (well.returncode, well.stderr) == (0, ""), well
    names = {line[8:].split("  ")[0] for line in well.stdout.splitlines()}
    assert names >= {"versions", "codec key", "link secret", "keys file", "store", "temporal", "retention", "clock"}
    ill = {**environment, "REELGATE_LINK_SECRET": "short"}
    done = await asyncio.to_thread(reelgate, "doctor", "--json", environment=ill)
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (1, False)
    [bad] = [finding for finding in report["findings"] if finding["state"] == "broken"]
    assert (bad["name"], "32 characters" in bad["detail"]) == ("link secret", True)
    assert is_well([Finding(name="x", state=State.LOOK, detail="", remedy="")])
