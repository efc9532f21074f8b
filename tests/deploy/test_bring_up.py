"""The jobs and services of the compose file run: its scripts, commands and variables, with hosts and folders of here.

What only an engine can show (images, networks, mounts, PostgreSQL, the store's image) is not shown here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from activities.storage import ObjectStore
from tests.deploy.compose import DOCKERFILES, ROOT, Service, document, services
from tests.deploy.test_compose import image_environment
from workers.codec import parse_keys
from workers.connection import check_search_attributes
from workers.devserver import free_port, temporal_binary
from workers.links import SignedLinks

BIN = Path(sys.executable).parent
SERVICES = services()


def make_secrets(folder: Path) -> None:
    subprocess.run([ROOT / "deploy/make-secrets.sh", folder], check=True, capture_output=True)


@dataclass(frozen=True)
class Site:
    """Where this machine has what the compose file names."""

    secrets: Path
    data: Path
    temporal: str
    s3: str

    def here(self, text: str) -> str:
        """A word of the compose file with hosts and folders of this machine."""
        for name, secret in document()["secrets"].items():
            text = text.replace(f"/run/secrets/{name}", str(self.secrets / Path(secret["file"]).name))
        for there, here in (
            ("temporal:7233", self.temporal),
            ("http://s3:8333", self.s3),
            ("/var/lib/reelgate", str(self.data)),
            ("/deploy/", f"{ROOT}/deploy/temporal/"),
        ):
            text = text.replace(there, here)
        return text

    def environment(self, service: Service, **more: str) -> dict[str, str]:
        """Variables of a service as its container has them."""
        image = image_environment(DOCKERFILES[0]) if service.ours else {}
        image = {name: value for name, value in image.items() if name.startswith("REELGATE_") and "$" not in value}
        given = {**image, **service.environment, **more}
        return {"PATH": f"{BIN}:{os.environ['PATH']}"} | {name: self.here(value) for name, value in given.items()}

    def command(self, service: Service) -> list[str]:
        """Entrypoint and command of a service."""
        return [self.here(word) for word in service.argv]


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """A folder of fresh secrets."""
    make_secrets(tmp_path / "secrets")
    return tmp_path / "secrets"


@pytest.fixture
def site(temporal: WorkflowEnvironment, secrets: Path, tmp_path: Path) -> Iterator[Site]:
    """A Temporal server, and a store that takes the credentials of the secrets."""
    options = json.loads((secrets / "store_options.json").read_text())
    address = f"127.0.0.1:{free_port()}"
    (tmp_path / "objects").mkdir()
    store = subprocess.Popen(
        [
            *(BIN / "rclone", "serve", "s3", tmp_path / "objects", "--addr", address, "--config", ""),
            *("--auth-key", f"{options['access_key_id']},{options['secret_access_key']}", "--dir-cache-time", "0s"),
        ],
        stderr=subprocess.DEVNULL,
    )
    here = Site(
        secrets=secrets,
        data=tmp_path / "data",
        temporal=temporal.client.service_client.config.target_host,
        s3=f"http://{address}",
    )
    for name in ("rclone.conf", "store_options.json"):
        file = secrets / name
        file.chmod(0o600)
        file.write_text(here.here(file.read_text()))
    try:
        yield here
    finally:
        store.kill()
        store.wait()


def run_job(site: Site, name: str, **more: str) -> str:
    done = subprocess.run(
        site.command(SERVICES[name]),
        env=site.environment(SERVICES[name], **more),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@asynccontextmanager
async def started(site: Site, service: Service, log: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A service of ours as a process, and the URL of its health check."""
    port = str(free_port())
    environment = site.environment(
        service, REELGATE_HOST="127.0.0.1", REELGATE_PORT=port, REELGATE_WORKER_HEALTH_PORT=port
    )
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *site.command(service), env=environment, cwd=log.parent, stdout=output, stderr=output
        )
    try:
        yield process, f"http://127.0.0.1:{port}/healthz"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def healthy(process: asyncio.subprocess.Process, url: str, log: Path) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False) as http:
        while True:
            assert process.returncode is None, f"it ended, see {log}"
            try:
                reply = await http.get(url, timeout=2)
            except httpx.TransportError:
                await asyncio.sleep(0.1)
                continue
            assert reply.status_code == 200, reply.text
            return


class TestSecrets:
    def test_reelgate_accepts_what_the_script_makes(self, secrets: Path) -> None:
        (key,) = parse_keys((secrets / "codec.keys").read_text(), source="codec.keys")
        assert len(key.secret) == 32
        SignedLinks("http://localhost", (secrets / "link.secret").read_text().strip())
        options = json.loads((secrets / "store_options.json").read_text())
        ObjectStore.from_url("s3://reelgate", options=options)

    def test_the_store_the_bucket_job_and_reelgate_get_the_same_credentials(self, secrets: Path) -> None:
        options = json.loads((secrets / "store_options.json").read_text())
        (identity,) = json.loads((secrets / "s3_identities.json").read_text())["identities"]
        pair = (options["access_key_id"], options["secret_access_key"])
        assert [(each["accessKey"], each["secretKey"]) for each in identity["credentials"]] == [pair]
        rclone = (secrets / "rclone.conf").read_text()
        assert all(text in rclone for text in (*pair, options["endpoint"]))

    def test_two_runs_elsewhere_make_different_secrets(self, secrets: Path, tmp_path: Path) -> None:
        make_secrets(tmp_path / "other")
        for file in secrets.iterdir():
            if file.name != ".gitignore":
                assert file.read_text() != (tmp_path / "other" / file.name).read_text()

    def test_a_second_run_changes_nothing(self, secrets: Path) -> None:
        before = {file.name: file.read_text() for file in secrets.iterdir()}
        make_secrets(secrets)
        assert {file.name: file.read_text() for file in secrets.iterdir()} == before

    def test_the_folder_is_the_owners_and_containers_can_read_the_files(self, secrets: Path) -> None:
        assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
        files = [file for file in secrets.iterdir() if file.name != ".gitignore"]
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o444}
        assert (secrets / ".gitignore").read_text() == "*\n"

    def test_the_files_mounted_are_the_files_made(self, secrets: Path) -> None:
        mounted = {Path(secret["file"]) for secret in document()["secrets"].values()}
        assert {file.name for file in mounted} == {file.name for file in secrets.iterdir()} - {".gitignore"}
        assert {file.parent for file in mounted} == {Path("deploy/secrets")}


class TestJobs:
    async def test_the_namespace_job_can_be_repeated_and_changes_the_retention(self, site: Site) -> None:
        name = "deployed"
        client = await Client.connect(site.temporal, namespace=name, lazy=True)
        for days in (7, 9):
            run_job(
                site,
                "temporal-namespace",
                TEMPORAL_NAMESPACE=name,
                RETENTION_DAYS=str(days),
                PATH=f"{Path(temporal_binary()).parent}:{os.environ['PATH']}",
            )
            reply = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=name))
            assert reply.config.workflow_execution_retention_ttl.ToTimedelta() == timedelta(days=days)
            await check_search_attributes(client)

    def test_the_bucket_job_makes_the_bucket_of_the_store_setting(self, site: Site) -> None:
        job = SERVICES["store-bucket"]
        # The image's entrypoint is rclone.
        rclone = replace(job, spec={**job.spec, "entrypoint": ["rclone"]})
        for _ in range(2):
            done = subprocess.run(site.command(rclone), env=site.environment(rclone), check=False, timeout=30)
            assert done.returncode == 0
        options: Mapping[str, str] = json.loads((site.secrets / "store_options.json").read_text())
        store = ObjectStore.from_url(SERVICES["api"].environment["REELGATE_STORE_URL"], options=options)

        async def kept() -> bytes:
            await store.put("a/b", b"clip", content_type="video/mp4")
            return await store.get("a/b")

        assert asyncio.run(kept()) == b"clip"


class TestServices:
    async def test_api_and_workers_come_up_healthy_with_their_own_settings_and_drain_on_sigterm(
        self, site: Site, tmp_path: Path
    ) -> None:
        run_job(site, "temporal-namespace", PATH=f"{Path(temporal_binary()).parent}:{os.environ['PATH']}")
        keys = site.data / "keys" / "keys.toml"
        keys.parent.mkdir(parents=True)
        keys.touch()
        (tmp_path / "objects" / "reelgate").mkdir()
        async with AsyncExitStack() as stack:
            processes = []
            for name in ("api", "control-worker", "callback-worker"):
                log = tmp_path / f"{name}.log"
                process, url = await stack.enter_async_context(started(site, SERVICES[name], log))
                processes.append((process, url, log))
            await asyncio.gather(*(healthy(*each) for each in processes))
            async with httpx.AsyncClient(trust_env=False) as http:
                ready = await http.get(processes[0][1].replace("/healthz", "/readyz"))
            assert ready.status_code == 200, ready.text
            for process, _, _ in processes:
                process.send_signal(signal.SIGTERM)
            for process, _, log in processes:
                assert await process.wait() == 0, log.read_text()

    def test_the_first_key_is_made_by_the_keys_service_in_the_file_that_the_jobs_leave_empty(self, site: Site) -> None:
        keys = site.data / "keys" / "keys.toml"
        keys.parent.mkdir(parents=True)
        keys.touch()
        service = SERVICES["keys"]
        create = replace(
            service, spec={**service.spec, "command": ["create", "--tenant", "acme", "--scope", "operator"]}
        )
        done = subprocess.run(
            site.command(create), env=site.environment(create), capture_output=True, text=True, check=False, timeout=30
        )
        assert done.returncode == 0, done.stderr
        assert "rg_" in done.stdout
        (key,) = tomllib.loads(keys.read_text())["keys"]
        assert (key["tenant"], key["scope"]) == ("acme", "operator")
