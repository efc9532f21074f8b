"""A deployment of real processes for the drill: Temporal, API, workers, a store and a receiver, each to be broken."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import httpx
from typer.testing import CliRunner

from api.cli import app
from api.cli_output import CommandError
from tests.api.api_processes import ApiProcess, environment_of
from tests.api.stand import NO_TLS
from tests.cli.stack import REELGATE, clean_environment
from tests.receiver import Receiver
from workers.codec import create_key_file
from workers.devserver import DevServer, free_port
from workers.keys import Scope
from workers.keys_admin import create_key
from workers.links import create_secret
from workers.settings import Settings

MODEL = "tiny-wan"
PATIENCE_SECONDS = 180.0
"""For whatever another process does; a loaded machine takes its time."""


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    text: str

    def json(self) -> dict[str, Any]:
        """The document of a command with --json."""
        document: dict[str, Any] = json.loads(self.text)
        return document


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for something that another process does.

    Raises:
        AssertionError: it is not done in time.
    """
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await holds():
                await asyncio.sleep(0.15)
    except TimeoutError:
        raise AssertionError(f"not within {PATIENCE_SECONDS:g} s: {what}") from None


@dataclass
class Stack:
    """The processes, and the operator who looks at them."""

    folder: Path
    receiver: Receiver
    server: DevServer
    settings: Settings
    api: ApiProcess
    operator_key: str
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    @classmethod
    async def open(cls, folder: Path, receiver: Receiver) -> Self:
        """Start everything but GPU workers."""
        server = DevServer(state_file=folder / "temporal.db", port=free_port(), ui_port=free_port())
        settings = Settings(
            environment="development",
            data_dir=folder,
            temporal_address=server.address,
            namespace="default",
            extra_models=(MODEL,),
            max_pending_tasks=50,
            request_rate_per_second=1_000,
            request_burst=1_000,
            submit_burst=100,
            worker_heartbeat_seconds=1,
            worker_drain_seconds=2,
            inference_threads=1,
            max_attempts=2,
            step_timeout_seconds=4,
            kill_grace_seconds=2,
        )
        create_key_file(settings.codec_key_file)
        create_secret(settings.link_secret_file)
        key = create_key(settings.keys_file, tenant="drill", scope=Scope.OPERATOR).token
        api = ApiProcess(settings, folder / "api.log")
        stack = cls(folder=folder, receiver=receiver, server=server, settings=settings, api=api, operator_key=key)
        try:
            await stack.start_server()
            await server.prepare(retention=timedelta(days=7))
            api.start()
            for name in ("control", "callback"):
                stack.start_worker(name)
            await asyncio.to_thread(api.until_ready)
        except BaseException:
            stack.close()
            raise
        return stack

    def close(self) -> None:
        """End every process."""
        self.api.kill()
        for process in self.processes.values():
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
        for process in self.processes.values():
            process.wait(10)

    async def start_server(self) -> None:
        """Start the Temporal server on the state it had."""
        self._spawn("temporal", list(self.server.command()), {})
        await self.server.wait_until_ready(timeout=timedelta(seconds=60))

    def start_worker(self, name: str) -> None:
        """`control`, `callback` or `gpu-<anything>`."""
        kind = name.partition("-")[0]
        self.ports[name] = free_port()
        environment = {"REELGATE_WORKER_NAME": name, "REELGATE_WORKER_HEALTH_PORT": str(self.ports[name])}
        self._spawn(name, [*REELGATE, "worker", kind], {**environment_of(self.settings), **environment})

    def kill(self, name: str) -> None:
        """SIGKILL, and wait for the end."""
        self.processes[name].kill()
        self.processes[name].wait(10)

    def inference_process(self, worker: str) -> int:
        """Process id of the child that holds a GPU worker's device."""
        pid = self.processes[worker].pid
        # The last one: a resource tracker may come before it.
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[-1])

    def _spawn(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=clean_environment(**environment), stdout=log, stderr=subprocess.STDOUT
            )

    async def reelgate(self, *arguments: str) -> Said:
        """Run a command as an operator would; in a thread, since an interpreter takes longer to start than it works."""
        environment = {"REELGATE_URL": self.api.url, "REELGATE_API_KEY": self.operator_key}

        def invoke() -> Said:
            done = CliRunner().invoke(app, list(arguments), env=environment)
            if isinstance(done.exception, CommandError):
                return Said(done.exception.code, str(done.exception))
            return Said(done.exit_code, done.stdout)

        return await asyncio.to_thread(invoke)

    async def doctor(self, **changes: str) -> Said:
        """`reelgate doctor` on this machine, in a process of its own."""

        def run() -> Said:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "api.cli", "doctor"],
                env=clean_environment(**{**environment_of(self.settings), **changes}),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            return Said(done.returncode, "\n".join(x for x in done.stdout.splitlines() if x.startswith("broken")))

        return await asyncio.to_thread(run)

    async def metric(self, process: str, series: str) -> float:
        """A value of a process's metrics page; NaN while it is not there."""
        url = self.api.url if process == "api" else f"http://127.0.0.1:{self.ports[process]}"
        async with httpx.AsyncClient(verify=NO_TLS, timeout=10) as http:
            page = (await http.get(f"{url}/metrics")).text
        match = re.search(rf"^{re.escape(series)} (\S+)$", page, re.MULTILINE)
        return float(match[1]) if match else math.nan

    async def call(self, method: str, path: str, body: object = None) -> httpx.Response:
        """One request of the operator's key."""
        headers = {"Authorization": f"Bearer {self.operator_key}"}
        async with httpx.AsyncClient(base_url=f"{self.api.url}/api/v1", verify=NO_TLS, timeout=30) as http:
            return await http.request(method, path, json=body, headers=headers)

    async def submit(self, prompt: str, *, steps: int = 4, **fields: object) -> str:
        """The id of a new task."""
        size = {"width": 64, "height": 64, "num_frames": 9, **fields}
        body = {"model": MODEL, "prompt": prompt, "num_inference_steps": steps, **size}
        reply = await self.call("POST", "/tasks", body)
        assert reply.status_code == 202, reply.text
        return str(reply.json()["task_id"])

    async def task(self, task_id: str) -> dict[str, Any]:
        """A task as it reads now."""
        found: dict[str, Any] = (await self.call("GET", f"/tasks/{task_id}")).json()
        return found

    async def reached(self, task_id: str, status: str) -> dict[str, Any]:
        """The task once it has this status; an ended one has to be closed, too."""
        found: dict[str, Any] = {}

        async def holds() -> bool:
            nonlocal found
            found = await self.task(task_id)
            return bool(found.get("status") == status and (found["is_terminal"] or status in ("QUEUED", "PROCESSING")))

        try:
            await until(holds, f"{task_id} is {status}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {found}") from None
        return found
