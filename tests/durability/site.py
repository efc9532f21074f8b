"""A deployment of real processes on this machine, made to be killed: server, workers, store and a receiver.

Every start of a GPU worker costs seven seconds of a core, so a test takes those that the test before it left alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import httpx
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowFailureError

from activities.inference.catalogue import AskedParameters, load_catalogue
from tests.api.stand import NO_TLS
from tests.cli.stack import REELGATE, clean_environment
from tests.receiver import Receiver
from tests.workflows.jobs import record_of, start_job, status_of
from workers.codec import create_key_file
from workers.connection import connect
from workers.devserver import DevServer, free_port
from workers.keys import Scope
from workers.keys_admin import create_key
from workers.links import create_secret
from workers.settings import Settings
from workflows import naming
from workflows.failures import FailureCode
from workflows.tasks import CallbackTarget, GenerationInput, Limits, TaskEvent, TaskRecord, User

MODELS = ("tiny-wan", "tiny-ltx")
GPU_WORKERS = ("gpu-a", "gpu-b")
TENANT = "durable"
PATIENT = Limits(queue_timeout_seconds=60, heartbeat_timeout_seconds=3, deadline_seconds=240, kill_grace_seconds=2)
"""Limits of the jobs here: a lost worker is noticed within 3 s."""


@dataclass
class Process:
    """One process of the site."""

    name: str
    popen: subprocess.Popen[bytes]
    health_port: int | None = None

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.popen.poll() is None

    def device(self) -> dict[str, Any]:
        """The one device of a GPU worker, as its health port shows it."""
        shown = httpx.get(f"http://127.0.0.1:{self.health_port}/healthz", timeout=20, verify=NO_TLS).json()
        (device,) = shown["devices"]
        return dict(device)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it alone."""
        self.popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.popen.kill()
        self.popen.wait(10)

    def children(self) -> list[int]:
        """Process ids of its children."""
        return [int(p) for p in Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()]


@dataclass
class Site:
    """Everything that a task needs, in processes of their own."""

    folder: Path
    receiver: Receiver
    server: DevServer
    settings: Settings
    processes: dict[str, Process] = field(default_factory=dict)
    _client: Client | None = None

    @classmethod
    async def open(
        cls, folder: Path, receiver: Receiver, *, workers: Sequence[str] = ("control", "callback", *GPU_WORKERS)
    ) -> Self:
        """Start the server and workers; by default one control and one callback worker, and two GPU workers."""
        port, ui_port = free_port(), free_port()
        server = DevServer(state_file=folder / "temporal.db", port=port, ui_port=ui_port)
        settings = Settings(
            environment="development",
            data_dir=folder,
            temporal_address=server.address,
            namespace="default",
            extra_models=MODELS,
            worker_drain_seconds=1,
            inference_threads=1,
        )
        site = cls(folder=folder, receiver=receiver, server=server, settings=settings)
        create_key_file(settings.codec_key_file)
        create_secret(settings.link_secret_file)
        create_key(settings.keys_file, tenant=TENANT, scope=Scope.USER)
        await site.start_server()
        await server.prepare(retention=timedelta(days=7))
        for name in workers:
            site.start(name)
        return site

    async def start_server(self) -> None:
        """Start the Temporal server on its old state."""
        self._spawn("temporal", list(self.server.command()), {})
        await self.server.wait_until_ready(timeout=timedelta(seconds=60))

    def start(self, name: str, **environment: str) -> Process:
        """Start a worker: `control`, `callback` or `gpu`, or one of these with `-<anything>` behind it."""
        kind = name.split("-", maxsplit=1)[0]
        port = free_port() if kind == "gpu" else None
        health = {"REELGATE_WORKER_HEALTH_PORT": str(port)} if port else {}
        process = self._spawn(
            name, [*REELGATE, "worker", kind], {"REELGATE_WORKER_NAME": name, **health, **environment}
        )
        process.health_port = port
        return process

    def gpu_workers(self, count: int) -> list[str]:
        """Have so many GPU workers, of those that live if possible; their names. New ones take a moment to poll."""
        alive = [name for name in GPU_WORKERS if name in self.processes and self.processes[name].alive]
        for name in alive[count:]:
            self.processes[name].kill()
        started = [name for name in GPU_WORKERS if name not in alive][: max(0, count - len(alive))]
        for name in started:
            self.start(name)
        return [*alive[:count], *started]

    def environment(self, **changes: str) -> dict[str, str]:
        """Environment of every process of the site."""
        return clean_environment(
            REELGATE_ENVIRONMENT="development",
            REELGATE_DATA_DIR=str(self.folder),
            REELGATE_TEMPORAL_ADDRESS=self.server.address,
            REELGATE_EXTRA_MODELS=",".join(MODELS),
            REELGATE_WORKER_DRAIN_SECONDS="1",
            REELGATE_INFERENCE_THREADS="1",
            **changes,
        )

    def _spawn(self, name: str, command: list[str], environment: dict[str, str]) -> Process:
        with (self.folder / f"{name}.log").open("ab") as log:
            popen = subprocess.Popen(
                command,
                env={**self.environment(), **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = Process(name=name, popen=popen)
        return self.processes[name]

    def close(self) -> None:
        """End every process of the site."""
        for process in self.processes.values():
            if process.alive:
                os.kill(process.popen.pid, signal.SIGCONT)
                process.popen.kill()
        for process in self.processes.values():
            process.popen.wait(10)

    async def client(self) -> Client:
        """A client with the site's codec. It finds the server again after a restart."""
        if self._client is None:
            self._client = await connect(self.settings)
        return self._client

    def job(self, *, model: str = "tiny-wan", steps: int = 100, limits: Limits = PATIENT) -> GenerationInput:
        """A request as the API would accept it; about 12 ms a step on an idle core."""
        catalogue = load_catalogue(extra_builtin=MODELS)
        spec = catalogue.get(model)
        asked = AskedParameters(prompt=f"take {uuid4()}", width=64, height=64, num_frames=9, num_inference_steps=steps)
        parameters = catalogue.resolve(spec, asked).with_seed(7)
        user = User(tenant=TENANT)
        return GenerationInput(
            task_id=f"t{uuid4().hex[:26]}",
            user=user,
            parameters=parameters,
            model_revision=spec.revision,
            pool=spec.pool,
            artifact_key=naming.artifact_key(user, parameters, spec.revision),
            accepted_at=datetime.now(UTC),
            limits=limits,
            callback=CallbackTarget(url=self.receiver.url, events=tuple(TaskEvent)),
        )

    async def submit(self, job: GenerationInput) -> None:
        """Start the job."""
        await start_job(await self.client(), job)

    async def describe(self, job: GenerationInput) -> WorkflowExecutionDescription:
        """The job as any reader sees it."""
        return await (await self.client()).get_workflow_handle(job.task_id).describe()

    async def failures(self, job: GenerationInput) -> list[FailureCode | None]:
        """Outcomes of the attempts so far, while the run is open."""
        description = await self.describe(job)
        if naming.MEMO_RECORD not in description.raw_description.workflow_execution_info.memo.fields:
            return []
        return [a.outcome for a in (await record_of(description)).attempts]

    async def until_running(self, job: GenerationInput, *, after: float = 0.4) -> str:
        """Wait until a worker has run the job for `after` seconds; the name of the worker."""
        async with asyncio.timeout(90):
            while status_of(description := await self.describe(job)) != "PROCESSING":
                await asyncio.sleep(0.05)
        worker = description.typed_search_attributes.get(naming.WORKER_ID)
        assert worker is not None
        await asyncio.sleep(after)
        return worker.split("/")[0]

    async def record(self, job: GenerationInput, *, timeout: float = 180) -> TaskRecord:
        """Wait for the end; the final record."""
        handle = (await self.client()).get_workflow_handle(job.task_id)
        async with asyncio.timeout(timeout):
            with contextlib.suppress(WorkflowFailureError):
                await handle.result()
        description = await handle.describe()
        record = await record_of(description)
        assert status_of(description) == record.status
        return record

    def manifests(self, job: GenerationInput) -> list[Path]:
        """Published clips under the job's artifact key."""
        return sorted((self.folder / "store" / naming.artifact_prefix(job.artifact_key)).glob("*/manifest.json"))

    def callbacks(self, job: GenerationInput) -> list[str]:
        """Terminal events that the receiver got for the job."""
        return [str(body["type"]) for r in self.receiver.requests if (body := r.json()).get("task_id") == job.task_id]

    async def check_one_ending(self, job: GenerationInput, record: TaskRecord) -> None:
        """One terminal callback, and exactly the artifact that the record names."""
        async with asyncio.timeout(30):
            while not self.callbacks(job):
                await asyncio.sleep(0.1)
        await asyncio.sleep(0.3)
        assert self.callbacks(job) == [f"task.{record.status.lower()}"]
        published = [m.parent.name for m in self.manifests(job)]
        assert published == ([record.artifact.token] if record.artifact else [])


def quick(limits: Limits = PATIENT, **changes: float) -> Limits:
    """Other limits for one job."""
    return replace(limits, **changes)  # type: ignore[arg-type]
