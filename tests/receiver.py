"""A real HTTP(S) receiver on loopback that behaves, well or badly, as a test tells it.

async with Receiver() as receiver:
    receiver.script(respond(503), respond(200))      # the next two requests; afterwards `receiver.default`
    ...                                              # deliver to receiver.url
    await receiver.wait_for(2)
    body = receiver.requests[1].verify(secret)
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Self

from standardwebhooks import Webhook

_MAX_HEAD = 64 * 1024
_CHUNK = b"x" * 16_384


@dataclass(frozen=True, kw_only=True)
class ReceivedRequest:
    """A request as it came."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    at: float = field(default_factory=time.monotonic)
    server_name: str | None = None
    """SNI."""

    def json(self) -> dict[str, object]:
        """The body."""
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found

    def verify(self, secret: str) -> dict[str, object]:
        """The body, if the official library accepts its signature; raises `WebhookVerificationError`."""
        found = Webhook(secret).verify(self.body, dict(self.headers))
        assert isinstance(found, dict)
        return found


class Exchange:
    """One request and the connection to answer it on."""

    def __init__(self, request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        self.request = request
        self._writer = writer
        self.reusable = False
        """Whether the connection may take another request."""

    async def write(self, piece: bytes) -> None:
        """Send raw bytes; raises `ConnectionError` once the sender has gone."""
        self._writer.write(piece)
        await self._writer.drain()
        if self._writer.is_closing():
            raise ConnectionResetError

    async def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the status line and the headers."""
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{k}: {v}" for k, v in headers.items())]
        await self.write("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def reset(self) -> None:
        """Break the connection off with a TCP reset."""
        raw: socket.socket = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Behaviour = Callable[[Exchange], Awaitable[None]]


def respond(
    status: int = 200, body: bytes | str = b"ok", *, headers: Mapping[str, str] | None = None, after: float = 0.0
) -> Behaviour:
    """Answer properly, `after` seconds."""
    content = body.encode() if isinstance(body, str) else body

    async def behave(exchange: Exchange) -> None:
        await asyncio.sleep(after)
        await exchange.head(status, {"content-length": str(len(content)), **(headers or {})})
        await exchange.write(content)
        exchange.reusable = True

    return behave


def redirect(location: str, status: int = 302) -> Behaviour:
    """Point elsewhere."""
    return respond(status, b"", headers={"location": location})


def hang() -> Behaviour:
    """Take the request and never answer."""
    return respond(after=3_600)


def close() -> Behaviour:
    """Take the request and close without a word."""

    async def behave(exchange: Exchange) -> None:
        return

    return behave


def reset() -> Behaviour:
    """Take the request and reset the connection."""

    async def behave(exchange: Exchange) -> None:
        exchange.reset()

    return behave


def drip(status: int = 200, *, interval: float = 0.05) -> Behaviour:
    """Send the headers, then one byte at a time, without end."""

    async def behave(exchange: Exchange) -> None:
        await exchange.head(status, {"content-length": "1000000"})
        while True:
            await exchange.write(b"x")
            await asyncio.sleep(interval)

    return behave


def drip_headers(*, interval: float = 0.05) -> Behaviour:
    """Send one header at a time, without end."""

    async def behave(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            await exchange.write(b"x-drip: 1\r\n")
            await asyncio.sleep(interval)

    return behave


def flood_headers() -> Behaviour:
    """Send headers without end, as fast as they are taken."""

    async def behave(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            await exchange.write(b"x-flood: " + _CHUNK + b"\r\n")

    return behave


def endless(status: int = 200) -> Behaviour:
    """Send a body without end, as fast as it is taken."""

    async def behave(exchange: Exchange) -> None:
        await exchange.head(status, {"transfer-encoding": "chunked"})
        while True:
            await exchange.write(f"{len(_CHUNK):x}\r\n".encode() + _CHUNK + b"\r\n")

    return behave


def gzip_bomb(status: int = 200, *, megabytes: int = 64) -> Behaviour:
    """Send a small body that inflates a thousandfold."""
    return respond(status, gzip.compress(bytes(megabytes << 20), 9), headers={"content-encoding": "gzip"})


class Receiver:
    """Records every request and answers it by script, by path, or by default.

    Args:
        tls: server context, see `CertificateAuthority.server_context`; None: plain HTTP.
        host: name in `url`; the socket is always on 127.0.0.1.
        port: 0 takes a free one. A receiver that comes back after an outage asks for its old one.
    """

    def __init__(self, *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.requests: list[ReceivedRequest] = []
        self.default: Behaviour = respond()
        self.paths: dict[str, Behaviour] = {}
        self.connections = 0
        self.in_flight = 0
        self.max_in_flight = 0
        self.port = port
        self._tls = tls
        self._host = host
        self._script: deque[Behaviour] = deque()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Condition()
        self._server_names: dict[int, str | None] = {}
        if tls is not None:
            tls.sni_callback = lambda connection, name, _: self._server_names.update({id(connection): name})

    @property
    def url(self) -> str:
        """A callback URL of this receiver."""
        return self.url_of("/callbacks")

    def url_of(self, path: str) -> str:
        """URL of a path."""
        return f"{'https' if self._tls else 'http'}://{self._host}:{self.port}{path}"

    def script(self, *behaviours: Behaviour) -> None:
        """Answer the next requests like this, in order."""
        self._script.extend(behaviours)

    async def wait_for(self, count: int, timeout: float = 30.0) -> list[ReceivedRequest]:
        """Wait until `count` requests have come in all, and return them."""
        async with asyncio.timeout(timeout), self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) >= count)
        return self.requests

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._connected, "127.0.0.1", self.port, ssl=self._tls, limit=_MAX_HEAD, backlog=1_024
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
                while await self._exchange(reader, writer):
                    pass
        except asyncio.CancelledError:
            writer.transport.abort()  # the end of the receiver; streams log a cancelled callback as an error
        finally:
            self._serving.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        request = await self._read(reader, writer)
        behaviour = self._script.popleft() if self._script else self.paths.get(request.path, self.default)
        exchange = Exchange(request, writer)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            async with self._arrived:
                self.requests.append(request)
                self._arrived.notify_all()
            await self._until_gone(behaviour(exchange), reader)
        finally:
            self.in_flight -= 1
        return exchange.reusable

    @staticmethod
    async def _until_gone(answer: Awaitable[None], reader: asyncio.StreamReader) -> None:
        """Stop answering when the sender closes, so that `in_flight` counts what is really under way."""
        answering = asyncio.ensure_future(answer)
        watching = asyncio.ensure_future(_closed(reader))
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            answering.cancel()
            watching.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> ReceivedRequest:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return ReceivedRequest(
            method=method,
            path=path,
            headers=headers,
            body=body,
            server_name=self._server_names.get(id(writer.get_extra_info("ssl_object"))),
        )


async def _closed(reader: asyncio.StreamReader) -> None:
    while not reader.at_eof() and reader.exception() is None:
        await asyncio.sleep(0.005)
