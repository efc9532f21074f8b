"""`reelgate demo`: the whole way of one task, from the request to a playable clip and a signed callback.

Runs `reelgate dev` on free ports in a temporary folder, and a receiver that checks the callback's signature with the
official Standard Webhooks library. Ends with exit code 0 only when all of it happened.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from types import FrameType
from typing import Final

import httpx
from standardwebhooks import Webhook, WebhookVerificationError

from api.cli_client import CLIENT_FILE, Access, AccessFile, Gateway
from api.cli_follow import follow
from api.cli_output import EXIT_CONFIGURATION, EXIT_NO_CLIP, CommandError, out
from api.cli_tasks import explained
from api.dev_stack import TENANT
from api.schemas import Task
from workers.keys import KeyRing
from workflows.states import TaskStatus

PROMPT: Final = "a red circle moving right"
_READY_SECONDS: Final = 120.0
_CALLBACK_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 60.0
_MAX_BODY: Final = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Received:
    """One callback as it came in."""

    headers: dict[str, str]
    body: bytes


def run_demo(output: Path) -> int:
    """Run the demo; the clip and its poster are kept in `output`. Returns the exit code.

    Raises:
        CommandError: a part of the way did not happen; the message says which.
    """
    say = _Clock()
    folder = Path(tempfile.mkdtemp(prefix="reelgate-demo-"))
    log = folder / "dev.log"
    # As Ctrl-C: the stack is stopped on the way out.
    signal.signal(signal.SIGTERM, _interrupt)
    say(f"starting Temporal, API and workers in {folder}")
    try:
        with _receiver() as (callback_url, received), _stack(folder, log) as access:
            say(f"API {access.url}, Web UI {access.web_ui_url}, callbacks to {callback_url}")
            task = _make_clip(access, callback_url, output, say)
            _check_callback(folder / "keys.toml", task, received, say)
            say("stopping")
    except CommandError:
        out.print(f"what the programs wrote is in {log} and {folder / 'logs'}", markup=False)
        raise
    shutil.rmtree(folder)
    say("done: everything is stopped")
    return 0


class _Clock:
    """Says what happens, with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        out.print(f"{time.monotonic() - self._began:6.1f} s  ", style="dim", end="")
        out.print(text, markup=False)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _receiver() -> Iterator[tuple[str, Queue[Received]]]:
    """A receiver of callbacks: its URL, and what came in."""
    received: Queue[Received] = Queue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = min(int(self.headers.get("content-length", 0)), _MAX_BODY)
            received.put(Received(headers=dict(self.headers.items()), body=self.rfile.read(length)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/reelgate", received
        finally:
            server.shutdown()
            serving.join()


@contextmanager
def _stack(folder: Path, log: Path) -> Iterator[AccessFile]:
    """`reelgate dev` in a folder, until it is ready; stopped afterwards."""
    command = [sys.executable, "-P", "-m", "api.cli", "dev", "--data-dir", str(folder)]
    command += ["--port", "0", "--temporal-port", "0", "--ui-port", "0"]
    with log.open("w", encoding="utf-8") as written:
        # A session of its own: Ctrl-C comes here first, and from here to it.
        dev = subprocess.Popen(  # noqa: S603 - our own command
            command, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield _wait_until_ready(dev, folder, log)
        finally:
            dev.terminate()
            try:
                code = dev.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                dev.kill()
                raise CommandError(
                    f"`reelgate dev` did not stop within {_STOP_SECONDS:g} s", EXIT_CONFIGURATION
                ) from None
    if code != 0:
        raise CommandError(f"`reelgate dev` ended with exit code {code}", EXIT_CONFIGURATION)


def _wait_until_ready(dev: subprocess.Popen[bytes], folder: Path, log: Path) -> AccessFile:
    give_up_at = time.monotonic() + _READY_SECONDS
    while time.monotonic() < give_up_at:
        if dev.poll() is not None:
            last = "\n".join(log.read_text(encoding="utf-8").splitlines()[-5:])
            raise CommandError(f"`reelgate dev` ended with exit code {dev.returncode}:\n{last}", EXIT_CONFIGURATION)
        access = _ready_access(folder)
        if access is not None:
            return access
        time.sleep(0.1)
    raise CommandError(f"`reelgate dev` was not ready within {_READY_SECONDS:g} s", EXIT_CONFIGURATION)


def _ready_access(folder: Path) -> AccessFile | None:
    try:
        access = AccessFile.model_validate_json((folder / CLIENT_FILE).read_bytes())
        ready = httpx.get(f"{access.url}/readyz", timeout=2, trust_env=False).is_success
    except (OSError, ValueError, httpx.HTTPError):
        return None
    return access if ready else None


def _make_clip(access: AccessFile, callback_url: str, output: Path, say: _Clock) -> Task:
    with explained(), Gateway(Access(url=access.url, api_key=access.api_key)) as gate:
        accepted, _ = gate.submit({"prompt": PROMPT, "callback_url": callback_url})
        say(f'accepted "{PROMPT}" as task {accepted.task_id}')
        say(f"Web UI {accepted.links.web_ui}")
        task = follow(gate, accepted.task_id, quiet=True, on_change=lambda state: say(f"state {state}"))
        if task.status is not TaskStatus.SUCCEEDED or task.result_url is None or task.poster_url is None:
            raise CommandError(f"the task ended {task.status}: {task.error_code} {task.error_message}", EXIT_NO_CLIP)
        output.mkdir(parents=True, exist_ok=True)
        for name, url in (("clip.mp4", task.result_url), ("poster.webp", task.poster_url)):
            size = gate.download(url, output / name)
            say(f"saved {(output / name).absolute()} ({size:,} bytes)")
    return task


def _check_callback(keys_file: Path, task: Task, received: Queue[Received], say: _Clock) -> None:
    try:
        callback = received.get(timeout=_CALLBACK_SECONDS)
    except Empty:
        raise CommandError(f"no callback within {_CALLBACK_SECONDS:g} s of the end", EXIT_NO_CLIP) from None
    (secret, *_) = KeyRing(keys_file).callback_secrets(TENANT)
    try:
        Webhook(secret).verify(callback.body, callback.headers)
    except WebhookVerificationError as error:
        raise CommandError(f"the callback's signature is wrong: {error}", EXIT_NO_CLIP) from error
    body = json.loads(callback.body)
    if (body["task_id"], body["status"]) != (task.task_id, task.status):
        raise CommandError(f"the callback tells of {body['task_id']} {body['status']}", EXIT_NO_CLIP)
    say(f"callback {body['type']} delivered; its signature is verified")
