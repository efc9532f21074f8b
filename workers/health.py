"""The health port of a worker: is the process alive, and what do its devices do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI, Response

from workers.settings import Settings
from workers.web_server import embedded_server, listen


def health_app(state: Callable[[], Mapping[str, object]]) -> FastAPI:
    """`GET /healthz`: `state()` as JSON, with 503 instead of 200 when it has `"ready": false`."""
    app = FastAPI(openapi_url=None)

    @app.get("/healthz")
    async def healthz(response: Response) -> Mapping[str, object]:
        shown = state()
        response.status_code = 200 if shown.get("ready", True) else 503
        return shown

    return app


@asynccontextmanager
async def serve_health(state: Callable[[], Mapping[str, object]], settings: Settings) -> AsyncIterator[int]:
    """Serve the health port meanwhile; yields the port, which matters when the setting is 0.

    Raises:
        ConfigurationError: the port is taken.
    """
    listening = listen(
        settings.worker_health_host, settings.worker_health_port or 0, setting="REELGATE_WORKER_HEALTH_PORT"
    )
    server = embedded_server(health_app(state), graceful_seconds=1)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield int(listening.getsockname()[1])
    finally:
        server.stop()
        await serving
