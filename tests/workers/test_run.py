"""Worker processes: start, drain, exit codes, health, and the sweep that control workers keep."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import cast

import httpx
import pytest
from temporalio.client import Client, ScheduleActionExecutionStartWorkflow, WorkflowExecutionStatus
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import FixedSizeSlotSupplier, Worker

from activities.callbacks import LOCAL_ATTEMPTS
from activities.retention import RETENTION_SCHEDULE
from activities.storage import ObjectStore
from workers import run
from workers.codec import create_key_file
from workers.devserver import free_port
from workers.keys_admin import create_key
from workers.links import create_secret
from workers.parts import WORKFLOW_SLOTS
from workers.registry import WORKFLOWS, WorkerKind, parts_of
from workers.run import worker_identity
from workers.settings import Settings
from workflows import contracts

REELGATE = (sys.executable, "-P", "-m", "api.cli")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data folder of the workers here, with its keys."""
    made: Path = tmp_path_factory.mktemp("workers")
    create_key_file(made / "codec.keys")
    create_secret(made / "link.secret")
    create_key(made / "keys.toml", tenant="acme")
    return made


@pytest.fixture(scope="module")
def environment(temporal: WorkflowEnvironment, folder: Path) -> dict[str, str]:
    """Environment of worker processes."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("REELGATE_", "TEMPORAL_"))},
        "REELGATE_DATA_DIR": str(folder),
        "REELGATE_TEMPORAL_ADDRESS": temporal.client.service_client.config.target_host,
        "REELGATE_WORKER_DRAIN_SECONDS": "5",
        "REELGATE_EXTRA_MODELS": "tiny-wan",
        "PYTHONUNBUFFERED": "1",
    }


def start(kind: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a worker process."""
    return subprocess.Popen(
        [*REELGATE, "worker", kind], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def until_polling(process: subprocess.Popen[str]) -> None:
    """Wait until it has begun to poll."""
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "worker_started":
            return
    raise AssertionError("it has ended")


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """It has ended when this is left."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def polling(environment: dict[str, str]) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Two control workers and a callback worker."""
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(ended(start(name.split("-", maxsplit=1)[0], environment)))
            for name in ("control-a", "control-b", "callback")
        }
        for process in started.values():
            until_polling(process)
        yield started


def end(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, list[str]]:
    """Send a signal; exit code and the events logged since."""
    process.send_signal(number)
    written, _ = process.communicate(timeout=30)
    return process.returncode, [json.loads(line)["event"] for line in written.splitlines()]


async def swept(client: Client, *, since: int) -> int:
    """Wait for the next sweep of the schedule to end; how many there were since."""
    handle = client.get_schedule_handle(RETENTION_SCHEDULE)
    async with asyncio.timeout(30):
        while (info := (await handle.describe()).info).num_actions == since or info.running_actions:
            await asyncio.sleep(0.2)
    action = info.recent_actions[-1].action
    assert isinstance(action, ScheduleActionExecutionStartWorkflow)
    sweep = client.get_workflow_handle(action.workflow_id, run_id=action.first_execution_run_id)
    # Not its result: that is encrypted.
    assert (await sweep.describe()).status is WorkflowExecutionStatus.COMPLETED
    return info.num_actions - since


@pytest.mark.usefixtures("polling")
async def test_several_control_workers_sweep_once(temporal: WorkflowEnvironment, folder: Path) -> None:
    store = ObjectStore.from_url((folder / "store").as_uri())
    old, young = f"inputs/{'a' * 32}/{'b' * 64}", f"inputs/{'a' * 32}/{'c' * 64}"
    for key in (old, young):
        await store.put(key, b"image", content_type="image/png")
    aged = time.time() - timedelta(days=8).total_seconds()
    os.utime(folder / "store" / old, (aged, aged))
    handle = temporal.client.get_schedule_handle(RETENTION_SCHEDULE)
    before = (await handle.describe()).info.num_actions
    await handle.trigger()
    assert await swept(temporal.client, since=before) == 1
    assert await store.head(old) is None
    assert await store.head(young) is not None


@pytest.mark.parametrize(("name", "number"), [("control-a", signal.SIGTERM), ("callback", signal.SIGINT)])
def test_a_worker_drains_on_a_signal_and_ends_with_0(
    name: str, number: signal.Signals, polling: dict[str, subprocess.Popen[str]]
) -> None:
    code, events = end(polling[name], number)
    assert code == 0
    assert events[-2:] == ["worker_draining", "worker_stopped"]


def test_a_gpu_worker_shows_its_devices_on_the_health_port_and_drains(environment: dict[str, str]) -> None:
    port = free_port()
    settings = {
        "REELGATE_WORKER_HEALTH_PORT": str(port),
        "REELGATE_DEVICES": "cpu:0",
        "REELGATE_WORKER_NAME": "host1",
    }
    with ended(start("gpu", environment | settings)) as process:
        until_polling(process)
        shown = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5).json()
        assert shown["pool"] == "default"
        assert shown["slots"] == 2
        (device,) = shown["devices"]
        assert (device["device"], device["worker_id"]) == ("cpu:0", "host1/0")
        assert [model["name"] for model in device["models"]] == ["moving-shapes", "tiny-wan"]
        inference = device["pid"]
        code, _ = end(process, signal.SIGTERM)
    assert code == 0
    assert inference is None or not Path(f"/proc/{inference}").exists()


def test_a_second_signal_ends_a_drain_at_once(environment: dict[str, str]) -> None:
    code = (
        "import asyncio, signal, os, threading, time\n"
        "from workers.run import _stop_signals\n"
        "async def main():\n"
        "    drain = asyncio.Event()\n"
        "    with _stop_signals(drain, grace=60):\n"
        "        print('up', flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 130


def test_a_drain_that_hangs_is_ended_by_the_watchdog(environment: dict[str, str]) -> None:
    code = (
        "import asyncio, time\n"
        "from workers import run\n"
        "run.WATCHDOG_SECONDS = 0.3\n"
        "async def main():\n"
        "    drain = asyncio.Event()\n"
        "    with run._stop_signals(drain, grace=0.2):\n"
        "        print('up', flush=True)\n"
        "        await drain.wait()\n"
        "        time.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 70


def test_a_worker_that_cannot_start_says_why_in_one_line_and_ends_with_5(
    environment: dict[str, str], tmp_path: Path
) -> None:
    cases = {
        "no namespace 'videos'": ("control", {"REELGATE_NAMESPACE": "videos"}),
        "none.toml": ("callback", {"REELGATE_KEYS_FILE": str(tmp_path / "none.toml")}),
        "REELGATE_STORE_URL": ("control", {"REELGATE_STORE_URL": "ftp://x"}),
        "REELGATE_DEADLINE_SECONDS": ("control", {"REELGATE_DEADLINE_SECONDS": "soon"}),
    }

    def attempt(complaint: str) -> subprocess.CompletedProcess[str]:
        kind, change = cases[complaint]
        return subprocess.run(
            [*REELGATE, "worker", kind],
            env=environment | change,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    with ThreadPoolExecutor() as threads:
        for complaint, done in zip(cases, threads.map(attempt, cases), strict=True):
            assert done.returncode == 5, done
            assert complaint in done.stderr
            assert "Traceback" not in done.stderr + done.stdout


async def test_a_worker_whose_polling_fails_for_good_ends_with_1() -> None:
    class Dead:
        task_queue = "q"

        async def run(self) -> None:
            raise RuntimeError("poll failed")

        async def shutdown(self) -> None:
            raise AssertionError("there is nothing to drain")

    assert await run._run_until(asyncio.Event(), cast("Worker", Dead()), "w") == 1


async def test_every_workflow_and_activity_is_served_by_one_kind_of_worker(
    temporal: WorkflowEnvironment, folder: Path
) -> None:
    settings = Settings(data_dir=folder)
    names: list[str] = []
    served: list[type] = []
    queues = []
    for kind in WorkerKind:
        async with parts_of(kind, settings, temporal.client) as parts:
            queues.append(parts.task_queue)
            names += [getattr(activity, "__temporal_activity_definition").name for activity in parts.activities]
            served += parts.workflows
            if parts.workflows:
                assert parts.tuner is not None
                slots = parts.tuner._get_workflow_task_slot_supplier()
                assert isinstance(slots, FixedSizeSlotSupplier)
                local = LOCAL_ATTEMPTS if kind is WorkerKind.CALLBACK else 0
                assert slots.num_slots == WORKFLOW_SLOTS + local
    assert sorted(queues) == ["callback", "control", "gpu-default"]
    assert len(served) == len(set(served))
    assert set(served) == set(WORKFLOWS)
    declared = {value for name, value in vars(contracts).items() if name.isupper() and isinstance(value, str)}
    assert sorted(names) == sorted(declared)


def test_identities_name_host_and_device() -> None:
    settings = Settings(worker_name="host1", devices=("cuda:0", "cuda:1"))
    assert worker_identity(WorkerKind.GPU, settings) == f"host1/cuda:0,cuda:1 pid {os.getpid()}"
    assert worker_identity(WorkerKind.CONTROL, settings) == f"host1/control pid {os.getpid()}"
    told = worker_identity(WorkerKind.GPU, settings, health="gpu-7:8090")
    assert told == f"host1/cuda:0,cuda:1 pid {os.getpid()} health gpu-7:8090"


def test_api_control_and_callback_processes_import_no_inference_library() -> None:
    code = (
        "import sys\nimport workers.run, api.cli_run\n"
        "print([name for name in ('torch', 'diffusers', 'transformers', 'numpy', 'av') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_control_worker_keeps_the_retention_schedule(temporal: WorkflowEnvironment, folder: Path) -> None:
    async with parts_of(WorkerKind.CONTROL, Settings(data_dir=folder), temporal.client):
        description = await asyncio.wait_for(temporal.client.get_schedule_handle("retention").describe(), 5)
    assert description.id == "retention"
