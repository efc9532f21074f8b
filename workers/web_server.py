"""uvicorn as a part of our processes: their own signals, their own logs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Generator
from typing import Final

import uvicorn
from fastapi import FastAPI

from workers.errors import ConfigurationError

KEEP_ALIVE_SECONDS: Final = 75
"""How long an idle connection stays open."""


class EmbeddedServer(uvicorn.Server):
    """A server that leaves signals to the process; uvicorn's own handlers would replace a worker's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield

    def stop(self) -> None:
        """Finish open requests and end; called again: end now."""
        self.force_exit = self.should_exit
        # Not `should_exit` alone: the event streams learn here that they must end, and would hold the end up.
        self.handle_exit(signal.SIGTERM, None)


def embedded_server(app: FastAPI, *, graceful_seconds: int) -> EmbeddedServer:
    """A server for an app; open requests may go on for `graceful_seconds` after `stop`."""
    return EmbeddedServer(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            # uvicorn would believe `X-Forwarded-For` of this machine; whom to believe is `trusted_proxies`' to say.
            proxy_headers=False,
            # Longer than the minute for which load balancers keep idle connections: who reuses one must not meet its
            # end. uvicorn's own 5 s are httpx's too, and now and then a request was lost between both.
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=graceful_seconds,
        )
    )


def listen(host: str, port: int, *, setting: str) -> socket.socket:
    """Open the port to serve on.

    Raises:
        ConfigurationError: it cannot be had; the message names the setting.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2_048)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port} ({setting}): {error.strerror}") from error
    # Connections inherit it. asyncio sets it only on sockets that name their protocol; without it the body of an
    # answer waits 40 ms for the client's delayed ACK of the headers.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


async def serve_until_signal(server: EmbeddedServer, listening: socket.socket) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code of the process: not 0 when the app did not start."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    try:
        await server.serve(sockets=[listening])
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    return 0 if server.started else 1
