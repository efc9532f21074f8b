"""Counts every request that is answered, whoever answers it: a route, the rate guard or the last resort."""

from __future__ import annotations

import time
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.metrics import ApiMetrics

ROUTE: Final = "reelgate.route"
"""Set in the scope of a request that is answered in front of the routes: the template of its path."""

_NO_ROUTE: Final = "none"
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestMetrics:
    """Counts requests by method, route template and status. The outermost layer: it sees every answer."""

    def __init__(self, app: ASGIApp, *, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at = time.perf_counter()

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"]
                self._metrics.count_request(
                    method if method in _METHODS else "OTHER",
                    route_of(scope),
                    message["status"],
                    time.perf_counter() - started_at,
                )
            await send(message)

        await self._app(scope, receive, send_counted)


def route_of(scope: Scope) -> str:
    """Template of the path of a request that has been answered; `none` when no route took it."""
    known = scope.get(ROUTE)
    if isinstance(known, str):
        return known
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else _NO_ROUTE
