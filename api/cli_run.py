"""`reelgate api` and `reelgate worker`: one process each, until a signal."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from api.app import create_app
from workers.settings import Settings
from workers.telemetry import configure_logging
from workers.web_server import embedded_server, listen, serve_until_signal

_GRACEFUL_SECONDS: Final = 5
"""How long open requests, event streams among them, may go on after SIGTERM."""

_log = structlog.stdlib.get_logger(__name__)


def run_api(settings: Settings) -> int:
    """Serve the HTTP API. Returns the exit code.

    Raises:
        ConfigurationError: the port is taken.
    """
    configure_logging(settings, process="api")
    listening = listen(settings.host, settings.port, setting="REELGATE_PORT")
    _log.info("api_starting", host=settings.host, port=listening.getsockname()[1], public_url=settings.public_url)
    server = embedded_server(create_app(settings), graceful_seconds=_GRACEFUL_SECONDS)
    return asyncio.run(serve_until_signal(server, listening))
