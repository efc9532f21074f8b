"""Real object stores for tests: an S3 endpoint (rclone) that can be killed, and a relay in front of one."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

ACCESS_KEY_ID = "reelgate-tests"
SECRET_ACCESS_KEY = "not-a-secret-anywhere"
BUCKET = "clips"

_READY = re.compile(r"Starting s3 server on \[(http://[\d.]+:\d+)/\]")
_REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) (\S+) HTTP/1\.1\r\n(.*?)\r\n\r\n", re.DOTALL)


@dataclass
class S3Endpoint:
    """A running `rclone serve s3` over a folder."""

    url: str
    folder: Path
    process: subprocess.Popen[bytes]

    def options(self, **more: str) -> dict[str, str]:
        """Store options that reach this endpoint."""
        return {
            "endpoint": self.url,
            "allow_http": "true",
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
            **more,
        }

    def new_root(self) -> str:
        """URL of a root that nobody has used."""
        return f"s3://{BUCKET}/{uuid4().hex}"

    def path_of(self, root: str, key: str) -> Path:
        """File behind an object."""
        return self.folder / root.removeprefix("s3://") / key

    def kill(self) -> None:
        """End the endpoint as a power cut would."""
        self.process.kill()
        self.process.wait()


@contextmanager
def serving_s3(folder: Path, *, port: int = 0) -> Iterator[S3Endpoint]:
    """Serve `folder/root` as S3 until the end of the block."""
    root, log = folder / "root", folder / f"rclone-{uuid4().hex}.log"
    (root / BUCKET).mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "rclone"),
                *("serve", "s3", str(root), "--addr", f"127.0.0.1:{port}"),
                *("--auth-key", f"{ACCESS_KEY_ID},{SECRET_ACCESS_KEY}"),
                *("--config", ""),
            ],
            stdout=output,
            stderr=output,
        )
    try:
        yield S3Endpoint(url=_address(process, log), folder=root, process=process)
    finally:
        process.kill()
        process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        if found := _READY.search(log.read_text()):
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.02)
    raise RuntimeError(f"rclone did not start: {log.read_text()}")


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Endpoint]:
    """One S3 endpoint for the whole session; tests that kill one start their own."""
    with serving_s3(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@dataclass(frozen=True)
class Request:
    """Head of a request that went through a relay."""

    method: str
    target: str
    headers: dict[str, str]


@dataclass
class Relay:
    """A TCP relay that keeps what clients sent; `stall` makes it fall silent."""

    target: str
    url: str = ""
    sent: list[bytearray] = field(default_factory=list)
    """What came in, by connection."""
    _flowing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._flowing.set()

    def stall(self) -> None:
        """Keep connections open and let nothing through any more."""
        self._flowing.clear()

    def requests(self) -> list[Request]:
        """Heads of the requests so far, in order within each connection."""
        return [
            Request(
                method=method.decode(),
                target=target.decode(),
                headers={
                    name.strip().lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head.decode("latin-1").split("\r\n"))
                },
            )
            for connection in self.sent
            for method, target, head in _REQUEST.findall(bytes(connection))
        ]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        parts = urlsplit(self.target)
        upstream_reader, upstream_writer = await asyncio.open_connection(parts.hostname, parts.port)
        kept = bytearray()
        self.sent.append(kept)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, upstream_writer, kept))
                group.create_task(self._pump(upstream_reader, writer, bytearray()))
        except* (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            upstream_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
        while received := await reader.read(1 << 16):
            kept += received
            await self._flowing.wait()
            writer.write(received)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def relay_to(url: str) -> AsyncIterator[Relay]:
    """Run a relay in front of `url`."""
    relay = Relay(target=url)
    connections: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        await relay.serve(reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    relay.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield relay
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
