"""A span for every request, with what the client says of its own trace as its parent. Imported when tracing is on."""

from __future__ import annotations

from typing import Final

import structlog
from opentelemetry import context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.middleware import header
from api.request_metrics import route_of

_UNTRACED: Final = frozenset({"/healthz", "/readyz", "/metrics"})
_SERVER_ERROR: Final = 500


class RequestTracing:
    """Starts the trace of a request, or goes on with that of its `traceparent`."""

    def __init__(self, app: ASGIApp, *, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in _UNTRACED:
            await self._app(scope, receive, send)
            return
        # Only this header: `tracestate` and `baggage` are words of the client.
        parent = self._propagator.extract({"traceparent": header(scope, b"traceparent")})
        span = self._tracer.start_span(scope["method"], context=parent, kind=SpanKind.SERVER)
        span.set_attribute("http.request.method", scope["method"])

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route, status = route_of(scope), message["status"]
                span.update_name(f"{scope['method']} {route}")
                span.set_attributes({"http.route": route, "http.response.status_code": status})
                if status >= _SERVER_ERROR:
                    span.set_status(Status(StatusCode.ERROR))
            await send(message)

        token = context.attach(set_span_in_context(span, parent))
        try:
            with structlog.contextvars.bound_contextvars(trace_id=format_trace_id(span.get_span_context().trace_id)):
                await self._app(scope, receive, send_noted)
        finally:
            context.detach(token)
            span.end()
