"""A running gateway for API tests: a real Temporal server, a real HTTP server on a socket, real workflows.

Only the GPU is played: an activity of the same name follows the first word of the prompt and publishes small files.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import uvicorn
from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from activities.admission import AdmissionListings
from activities.artifacts import ArtifactRepository
from activities.batches import BatchItems
from activities.storage import ObjectStore
from activities.video import EncodedClip
from api.admission import Admission
from api.app import create_app
from tests.workflows.jobs import callback_worker
from workers.codec import create_key_file
from workers.connection import connect
from workers.keys import CHECK_INTERVAL_SECONDS, Scope
from workers.keys_admin import create_key
from workers.links import create_secret
from workers.registry import object_store
from workers.settings import Settings
from workers.web_server import listen
from workflows import naming
from workflows.admission import AdmissionWorkflow
from workflows.batch import BatchWorkflow
from workflows.contracts import DELIVER_CALLBACK, GENERATE_CLIP, CallbackActivities, GenerationActivities
from workflows.failures import FailureCode
from workflows.generation import GenerationWorkflow
from workflows.tasks import (
    Artifact,
    AttemptStarted,
    DeliverCallbackInput,
    DeliveryAttempt,
    DeliveryOutcome,
    GenerateClipInput,
    GenerateClipResult,
    Phase,
    Progress,
)

WORKER_ID = "host/cpu:0"
GPU_SLOTS = 50
WORK_SECONDS = 0.2
"""Length of a `work ...` generation."""
VIDEO = bytes(range(256)) * 40
POSTER = b"RIFF....WEBP poster"


NO_TLS = httpx.create_ssl_context(verify=False)


def http_client(
    url: str = "", headers: Mapping[str, str] | Sequence[tuple[bytes, bytes]] | None = None
) -> httpx.AsyncClient:
    """A client for plain HTTP; one that loads the certificates of the machine takes longer than most tests."""
    return httpx.AsyncClient(base_url=url, headers=httpx.Headers(headers), timeout=30, verify=NO_TLS)


def api_settings(folder: Path, temporal_address: str, port: int, **changes: object) -> Settings:
    """Settings of one API with its secrets in `folder`."""
    values: dict[str, object] = {
        "environment": "development",
        "data_dir": folder,
        "temporal_address": temporal_address,
        "port": port,
        "worker_heartbeat_seconds": 1.0,
        "delete_stop_seconds": 2.0,
        "extra_models": ("tiny-wan-i2v",),
        "tiers": {
            "standard": {},
            "basic": {"max_priority": "normal"},
            "free": {"max_priority": "low"},
            "tight": {"max_pending_tasks": 2, "batch_parallelism": 1},
        },
        # Out of the way of tests that are not about limits.
        "max_pending_tasks": 1_000,
        "submit_rate_per_minute": 60_000.0,
        "submit_burst": 1_000,
        "request_rate_per_second": 10_000.0,
        "request_burst": 10_000,
        **changes,
    }
    settings = Settings.model_validate(values)
    create_key_file(settings.codec_key_file)
    create_secret(settings.link_secret_file)
    return settings


@contextmanager
def listening() -> Iterator[socket.socket]:
    """A socket on a free loopback port."""
    with listen("127.0.0.1", 0, setting="port") as sock:
        yield sock


@contextmanager
def serving(settings: Settings, sock: socket.socket, *, admission: Admission | None = None) -> Iterator[str]:
    """Serve the API on a socket, in a thread with an event loop of its own; yields its URL."""
    server = uvicorn.Server(
        uvicorn.Config(create_app(settings, admission=admission), log_config=None, access_log=False)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the API did not start"
        assert time.monotonic() < deadline, "the API did not start in time"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)


class PlayedGeneration(GenerationActivities):
    """Publishes at once; `hold ...` waits for its release, `work ...` takes `WORK_SECONDS`, `fail ...` fails.

    `drain ...` is handed back by its first worker, `flaky ...` fails until the store is `mended`. Whatever comes behind
    the word is ignored.
    """

    def __init__(self, client: Client, store: ObjectStore, folder: Path, settings: Settings) -> None:
        self._client = client
        self._artifacts = ArtifactRepository(store, retention=settings.retention)
        self._folder = folder
        self.calls: list[GenerateClipInput] = []
        self.taken: dict[str, activity.Info] = {}
        """By task id; both times in it are the server's."""
        self.mended = False
        self._released: set[str] = set()
        self._all_released = False

    @activity.defn(name=GENERATE_CLIP)
    async def generate_clip(self, attempt: GenerateClipInput) -> GenerateClipResult:
        self.calls.append(attempt)
        self.taken[attempt.task_id] = activity.info()
        await self._signal_start(attempt)
        match attempt.parameters.prompt.partition(" ")[0]:
            case "hold":
                await self._hold(attempt)
            case "work":
                await asyncio.sleep(WORK_SECONDS)
            case "fail":
                raise ApplicationError("frames are NaN", type=FailureCode.INVALID_OUTPUT, non_retryable=True)
            case "flaky" if not self.mended:
                raise ApplicationError("", type=FailureCode.STORAGE_UNAVAILABLE, non_retryable=True)
            case "drain" if attempt.attempt == 1:
                raise ApplicationError("", type=FailureCode.WORKER_SHUTDOWN, non_retryable=True)
        return GenerateClipResult(
            artifact=await self._publish(attempt), worker_id=WORKER_ID, worker_version="test", gpu_seconds=1.5
        )

    def runs(self, *tasks: dict[str, Any]) -> int:
        """Attempts made for these tasks."""
        ids = {task["task_id"] for task in tasks}
        return sum(call.task_id in ids for call in self.calls)

    def release(self, task: dict[str, Any]) -> None:
        """Let the held generation of a task end."""
        self._released.add(task["task_id"])

    def release_all(self) -> None:
        """Let every held generation end."""
        self._all_released = True

    async def _signal_start(self, attempt: GenerateClipInput) -> None:
        info = activity.info()
        assert info.workflow_id is not None
        await self._client.get_workflow_handle(info.workflow_id, run_id=info.workflow_run_id).signal(
            GenerationWorkflow.attempt_started,
            AttemptStarted(
                token=attempt.token,
                worker_id=WORKER_ID,
                started_at=info.started_time,
                queued_at=info.scheduled_time,
                worker_version="test",
            ),
        )

    async def _hold(self, attempt: GenerateClipInput) -> None:
        while not (self._all_released or attempt.task_id in self._released):
            activity.heartbeat(
                Progress(
                    attempt=attempt.attempt,
                    worker_id=WORKER_ID,
                    phase=Phase.STEP,
                    step=3,
                    total_steps=10,
                    percent=30.0,
                    eta_seconds=7.0,
                    gpu_seconds=0.5,
                )
            )
            await asyncio.sleep(0.05)

    async def _publish(self, attempt: GenerateClipInput) -> Artifact:
        folder = self._folder / attempt.token
        folder.mkdir()
        video, poster = folder / "video.mp4", folder / "poster.webp"
        video.write_bytes(VIDEO)
        poster.write_bytes(POSTER)
        p = attempt.parameters
        clip = EncodedClip(
            video=video, poster=poster, width=p.width, height=p.height, num_frames=p.num_frames, fps=p.fps
        )

        async def may_publish() -> bool:
            return True

        return await self._artifacts.publish(clip, attempt, may_publish=may_publish)


class PlayedDelivery(CallbackActivities):
    """A receiver that takes everything but what goes to a path with `down` in it."""

    def __init__(self, body: str = "{}") -> None:
        self._body = body

    @activity.defn(name=DELIVER_CALLBACK)
    async def deliver_callback(self, delivery: DeliverCallbackInput) -> DeliveryAttempt:
        down = "down" in delivery.url
        return DeliveryAttempt(
            number=delivery.number,
            outcome=DeliveryOutcome.RETRY if down else DeliveryOutcome.DELIVERED,
            started_at=datetime.now(UTC),
            duration_ms=1,
            status_code=503 if down else 200,
            body=self._body,
        )


@dataclass(kw_only=True)
class Stand:
    """The gateway of a test session."""

    url: str
    settings: Settings
    client: Client
    store: ObjectStore
    folder: Path
    keys: dict[str, str]
    """API keys by what they are for."""

    @property
    def service_key(self) -> str:
        """A key that acts for end users."""
        return self.keys["service"]

    @asynccontextmanager
    async def user(self, name: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
        """A client of one end user, a new one by default."""
        headers = {"Authorization": f"Bearer {self.service_key}", "X-User-Id": name or f"user-{uuid4().hex[:12]}"}
        async with http_client(f"{self.url}/api/v1", headers) as http:
            yield http

    async def keys_reloaded(self) -> None:
        """Return when the running API has looked at the keys file again."""
        await asyncio.sleep(CHECK_INTERVAL_SECONDS + 0.1)

    @asynccontextmanager
    async def control_worker(self) -> AsyncIterator[None]:
        """The control queue is served."""
        artifacts = ArtifactRepository(self.store, retention=self.settings.retention)
        listings = AdmissionListings(self.client)
        batches = BatchItems(self.client, self.store)
        async with Worker(
            self.client,
            task_queue=naming.CONTROL_QUEUE,
            workflows=[GenerationWorkflow, AdmissionWorkflow, BatchWorkflow],
            activities=[
                artifacts.find_artifact,
                artifacts.remove_artifacts,
                listings.list_running_tasks,
                listings.list_used,
                batches.run_batch_step,
                batches.cancel_batch_items,
                batches.remove_batch_items,
            ],
        ):
            yield

    @asynccontextmanager
    async def gpu_worker(
        self, *, slots: int = GPU_SLOTS, delivery: CallbackActivities | None = None
    ) -> AsyncIterator[PlayedGeneration]:
        """The GPU pool and the callbacks are served."""
        played = PlayedGeneration(self.client, self.store, self.folder, self.settings)
        # A connection of their own: the SDK may not report workers that follow the last ones of a connection at once.
        client = await connect(self.settings)
        generation = Worker(
            client,
            task_queue=naming.gpu_queue("default"),
            activities=[played.generate_clip],
            max_concurrent_activities=slots,
            max_heartbeat_throttle_interval=timedelta(seconds=0.2),
        )
        sender = delivery or PlayedDelivery()
        callbacks = callback_worker(client, sender)
        async with generation, callbacks:
            try:
                yield played
            finally:
                played.release_all()

    @asynccontextmanager
    async def workers(self, *, delivery: CallbackActivities | None = None) -> AsyncIterator[PlayedGeneration]:
        """Everything is served; callbacks are really delivered by a `delivery` that does."""
        async with self.control_worker(), self.gpu_worker(delivery=delivery) as played:
            yield played


def create_keys(settings: Settings) -> dict[str, str]:
    """One key of each kind that the tests use."""
    made = {
        "service": ("acme", Scope.SERVICE, "standard"),
        "user": ("bolt", Scope.USER, "standard"),
        "free": ("cheap", Scope.USER, "free"),
        "tight": ("small", Scope.USER, "tight"),
        "operator": ("acme", Scope.OPERATOR, "standard"),
        "revoked": ("gone", Scope.USER, "standard"),
    }
    return {
        name: create_key(settings.keys_file, tenant=tenant, scope=scope, tier=tier).token
        for name, (tenant, scope, tier) in made.items()
    }


def open_stand(folder: Path, url: str, settings: Settings, client: Client, keys: dict[str, str]) -> Stand:
    """Put a stand together."""
    clips = folder / "clips"
    clips.mkdir()
    return Stand(url=url, settings=settings, client=client, store=object_store(settings), folder=clips, keys=keys)


async def until(http: httpx.AsyncClient, task_id: str, *, timeout: float = 30, **expected: object) -> dict[str, Any]:
    """Poll a task until its fields are as expected, and return it. What succeeded or failed has to be closed, too."""
    if expected.get("status") in {"SUCCEEDED", "FAILED", "TIMEOUT"}:
        # The places are given back between the last state and the end of the run.
        expected.setdefault("is_terminal", True)
    deadline = time.monotonic() + timeout
    while True:
        task: dict[str, Any] = (await http.get(f"/tasks/{task_id}")).json()
        if all(task.get(name) == value for name, value in expected.items()):
            return task
        assert time.monotonic() < deadline, f"{expected} not reached: {task}"
        await asyncio.sleep(0.05)
