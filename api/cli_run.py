"""`reelgate api` and `reelgate worker`: one process each, until a signal."""

from __future__ import annotations

from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Final

import structlog
import uvloop

from api.app import create_app
from workers.errors import ConfigurationError
from workers.keys_admin import list_keys
from workers.settings import Settings
from workers.telemetry import configure_logging
from workers.web_server import embedded_server, listen, serve_until_signal

_GRACEFUL_SECONDS: Final = 5
"""How long open requests, event streams among them, may go on after SIGTERM."""

_log = structlog.stdlib.get_logger(__name__)


def run_api(settings: Settings) -> int:
    """Serve the HTTP API. Returns the exit code.

    Raises:
        ConfigurationError: the port is taken, the keys file is missing or wrong, or others could reach an API that
            has no key.
    """
    configure_logging(settings, process="api")
    check_keys_before_listening(settings)
    listening = listen(settings.host, settings.port, setting="REELGATE_PORT")
    _log.info("api_starting", host=settings.host, port=listening.getsockname()[1], public_url=settings.public_url)
    server = embedded_server(create_app(settings), graceful_seconds=_GRACEFUL_SECONDS)
    return uvloop.run(serve_until_signal(server, listening))


def check_keys_before_listening(settings: Settings) -> None:
    """Make sure that whoever can reach the API needs a key of ours.

    Raises:
        ConfigurationError: the keys file is missing or wrong, or it has no key and the API would not listen on
            loopback only.
    """
    now = datetime.now(UTC)
    if any(key.live(now) for key in list_keys(settings.keys_file)) or _is_loopback(settings.host):
        return
    raise ConfigurationError(
        f"REELGATE_HOST is {settings.host}, and {settings.keys_file} (REELGATE_KEYS_FILE) has no live key: "
        "make one with `reelgate keys create`, or listen on 127.0.0.1"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
