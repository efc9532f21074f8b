"""The metrics page of a process: a registry of its own, as Prometheus text.

A registry per process part and none that is global, so that several of them in one process (tests) do not mix. Label
values come from fixed lists or from the configuration, never from a client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import httpx
import structlog
from prometheus_client import (
    CollectorRegistry,
    Gauge,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from workers.settings import Settings

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SDK_LIMIT_SECONDS: Final = 2.0

_log = structlog.stdlib.get_logger(__name__)


def process_registry(process: str, settings: Settings) -> CollectorRegistry:
    """A registry with what every process tells of itself.

    Args:
        process: `api` or a kind of worker.
        settings: of this process.
    """
    # The times at which series began: twice the page for what nobody reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    about = Gauge(
        "reelgate_build_info", "Kind and version of this process; always 1.", ["process", "version"], registry=registry
    )
    about.labels(process, settings.build_id).set(1)
    return registry


def worker_page(registry: CollectorRegistry, sdk_address: str | None) -> Callable[[], Awaitable[bytes]]:
    """What a worker answers on `/metrics`: its own series, then those of the Temporal SDK.

    Args:
        registry: its own.
        sdk_address: `host:port` of the SDK's exporter in this process; None: it has none.
    """

    async def page() -> bytes:
        own = generate_latest(registry)
        return own if sdk_address is None else own + await _sdk_page(sdk_address)

    return page


async def _sdk_page(address: str) -> bytes:
    try:
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=_SDK_LIMIT_SECONDS) as http:  # noqa: S501 - no TLS in it: our own process
            answer = await http.get(f"http://{address}/metrics")
            return answer.raise_for_status().content
    except httpx.HTTPError as error:
        _log.warning("sdk_metrics_missing", address=address, reason=type(error).__name__)
        return b""
