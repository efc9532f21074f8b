"""Traces with OpenTelemetry: HTTP request, workflow, activities, callback. Needs the extra `otel`; off by default.

Spans leave this process with ids, names and times only. What an exception says may quote a prompt, so messages and
stack traces stay here; its type is exported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from opentelemetry.propagate import inject
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, Tracer
from temporalio.contrib.opentelemetry import TracingInterceptor

from workers.errors import ConfigurationError
from workers.settings import Settings

_EXPORTED: Final = frozenset(
    {
        "temporalWorkflowID",
        "temporalRunID",
        "temporalActivityID",
        "temporalUpdateID",
        "http.request.method",
        "http.route",
        "http.response.status_code",
    }
)
"""Attributes that leave the process."""
_SENT_HEADERS: Final = ("traceparent",)


class Tracing:
    """The tracer of one process.

    Args:
        exporter: where spans go, with what is not an id cut out.
        process: `api` or a kind of worker.
        version: of this process.
        sample_ratio: part of the traces that is kept; by trace id, so that all processes keep the same ones.
    """

    def __init__(self, exporter: SpanExporter, *, process: str, version: str, sample_ratio: float = 1.0) -> None:
        kept = TraceIdRatioBased(sample_ratio)
        self._provider = TracerProvider(
            # Also with a parent from outside: a client decides neither that we trace nor how much.
            sampler=ParentBased(root=kept, remote_parent_sampled=kept, remote_parent_not_sampled=ALWAYS_OFF),
            resource=Resource.create({SERVICE_NAME: f"reelgate-{process}", SERVICE_VERSION: version}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(IdsOnly(exporter)))
        self.tracer: Tracer = self._provider.get_tracer("reelgate")
        self.interceptor = TracingInterceptor(self.tracer)
        """For the Temporal client; workers that use the client have it too."""

    @contextmanager
    def request_out(self) -> Iterator[Mapping[str, str]]:
        """A span round a request to a receiver of callbacks; yields the headers that tell the receiver of it."""
        with self.tracer.start_as_current_span("POST callback", kind=SpanKind.CLIENT):
            carrier: dict[str, str] = {}
            inject(carrier)
            yield {name: carrier[name] for name in _SENT_HEADERS if name in carrier}

    def close(self) -> None:
        """Export what is left. Waits for the exporter."""
        self._provider.shutdown()


class IdsOnly(SpanExporter):
    """Passes spans on without what may hold words of a client."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Pass cleaned spans on."""
        return self._exporter.export([_cleaned(span) for span in spans])

    def shutdown(self) -> None:
        """End."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send what is held back."""
        return self._exporter.force_flush(timeout_millis)


def _cleaned(span: ReadableSpan) -> ReadableSpan:
    attributes = {name: value for name, value in (span.attributes or {}).items() if name in _EXPORTED}
    for event in span.events:
        raised = (event.attributes or {}).get("exception.type")
        if raised is not None:
            attributes["error.type"] = raised
    return ReadableSpan(
        name=span.name,
        context=span.context,
        parent=span.parent,
        resource=span.resource,
        attributes=attributes,
        links=span.links,
        kind=span.kind,
        status=Status(span.status.status_code),
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def exporter_of(settings: Settings) -> SpanExporter:
    """Where the settings send spans.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    if settings.trace_exporter == "otlp":
        # Its address and headers come from the standard OTEL_EXPORTER_OTLP_* variables.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - heavy

        return OTLPSpanExporter()
    if settings.trace_exporter == "file":
        return _to_file(settings)
    return ConsoleSpanExporter(out=sys.stdout, formatter=_line)


def _to_file(settings: Settings) -> SpanExporter:
    path = settings.trace_file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Line by line, so that several processes may write to one file.
        out = path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path} (REELGATE_TRACE_FILE): {error.strerror}") from error
    return ConsoleSpanExporter(out=out, formatter=_line)


def _line(span: ReadableSpan) -> str:
    return f"{span.to_json(indent=None)}\n"
