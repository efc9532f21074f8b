"""The health port of a worker: is the process alive, what do its devices do, and its metrics."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from fastapi import FastAPI, Response

from workers.connection import host_name
from workers.metrics import CONTENT_TYPE
from workers.settings import Settings
from workers.web_server import embedded_server, listen

_EVERY_ADDRESS: Final = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared with, not bound


async def _no_metrics() -> bytes:
    return b""


def health_app(
    state: Callable[[], Mapping[str, object]], metrics: Callable[[], Awaitable[bytes]] = _no_metrics
) -> FastAPI:
    """The paths of the port.

    `GET /healthz`: `state()` as JSON, with 503 instead of 200 when it has `"ready": false`. `GET /metrics`: what
    `metrics()` gives, in the Prometheus text format.
    """
    app = FastAPI(openapi_url=None)

    @app.get("/healthz")
    async def healthz(response: Response) -> Mapping[str, object]:
        shown = state()
        response.status_code = 200 if shown.get("ready", True) else 503
        return shown

    @app.get("/metrics")
    async def page() -> Response:
        return Response(await metrics(), media_type=CONTENT_TYPE)

    return app


def open_health_port(port: int, settings: Settings) -> socket.socket:
    """Open the port, before the worker has its name, which tells where it is.

    Raises:
        ConfigurationError: the port is taken.
    """
    return listen(settings.worker_health_host, port, setting="REELGATE_WORKER_HEALTH_PORT")


def health_address(listening: socket.socket, settings: Settings) -> str:
    """`host:port` under which the API reaches the health port."""
    host = settings.worker_health_host
    return f"{host_name(settings) if host in _EVERY_ADDRESS else host}:{listening.getsockname()[1]}"


@asynccontextmanager
async def serve_health(
    state: Callable[[], Mapping[str, object]],
    listening: socket.socket,
    *,
    metrics: Callable[[], Awaitable[bytes]] = _no_metrics,
) -> AsyncIterator[None]:
    """Serve the health port meanwhile."""
    server = embedded_server(health_app(state, metrics), graceful_seconds=1)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield
    finally:
        server.stop()
        await serving
