"""Logs of every process: one line per event, JSON or text, with the same fields whoever wrote the record.

structlog renders our own lines and those of the standard library (Temporal's workflow and activity loggers, uvicorn)
alike: what is passed as `extra=` becomes fields. Prompts, keys and bodies are never written: fields of such a name
are cut out whoever logs them, and tracebacks carry no local variables.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger
from temporalio import activity, workflow

from workers.errors import ConfigurationError
from workers.settings import Settings

if TYPE_CHECKING:
    from workers.tracing import Tracing

REDACTED: Final = "[redacted]"
_NEVER_WRITTEN: Final = frozenset(
    {
        "prompt",
        "negative_prompt",
        "image",
        "body",
        "authorization",
        "api_key",
        "token",
        "secret",
        "signature",
        "parameters",
    }
)
_QUIET: Final = ("httpx", "httpcore", "uvicorn", "asyncio", "temporalio.worker")
"""Loggers heard from warnings on only; httpx writes whole URLs with their queries."""
_CONTEXT_FIELDS: Final = ("workflow_id", "workflow_type", "activity_type")
"""What is kept of the context the SDK attaches to a record."""


def configure_logging(settings: Settings, *, process: str) -> None:
    """Send all logs of this process to stdout.

    Args:
        settings: `log_format` and `log_level`.
        process: name of the kind of process, e.g. `api` or `gpu`; a field of each line.
    """
    # The SDK would repeat its whole context at the end of each message.
    workflow.logger.workflow_info_on_message = False
    activity.logger.activity_info_on_message = False

    def name_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("process", process)
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        name_process,
        flatten_temporal_context,
        redact,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    output = logging.StreamHandler(sys.stdout)
    output.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(settings)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [output]
    root.setLevel(settings.log_level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def start_tracing(settings: Settings, *, process: str) -> Tracing | None:
    """The tracer of this process; None while tracing is off.

    Args:
        settings: `trace_exporter` and what belongs to it.
        process: name of the kind of process.

    Raises:
        ConfigurationError: OpenTelemetry is not installed, or the file cannot be written.
    """
    if settings.trace_exporter == "none":
        return None
    try:
        from workers.tracing import Tracing, exporter_of  # noqa: PLC0415 - an extra

        exporter = exporter_of(settings)
    except ImportError as error:
        raise ConfigurationError(
            f"REELGATE_TRACE_EXPORTER={settings.trace_exporter} needs the extra `otel`: "
            f"pip install 'reelgate[otel]' ({error.name} is missing)"
        ) from error
    return Tracing(exporter, process=process, version=settings.build_id, sample_ratio=settings.trace_sample_ratio)


def _rendering(settings: Settings) -> list[Processor]:
    if settings.log_format == "console":
        return [console_renderer(colors=sys.stdout.isatty())]
    return [
        # Plain tracebacks: the structured ones carry local variables, and those carry prompts.
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]


def console_renderer(*, colors: bool) -> structlog.dev.ConsoleRenderer:
    """Text for people, without the local variables that the default traceback shows."""
    return structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)


def flatten_temporal_context(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Keep the useful part of what the SDK attaches to a record, as plain fields."""
    for name in ("temporal_workflow", "temporal_activity"):
        context = event.pop(name, None)
        if isinstance(context, Mapping):
            for field in _CONTEXT_FIELDS:
                if field in context:
                    event.setdefault(field, context[field])
    core = event.pop("temporal_log", None)
    if core is not None:
        for field, value in core.fields.items():
            event.setdefault(field, str(value))
    event.pop("taskName", None)
    event.pop("__temporal_error_identifier", None)
    return event


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Cut out the value of each field whose name says that it must not be written."""
    for field in _NEVER_WRITTEN & event.keys():
        event[field] = REDACTED
    return event
