"""Traces: what is exported, what is not, and that histories do not depend on them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowFailureError, WorkflowHistory
from temporalio.worker import Replayer

from api.request_tracing import RequestTracing
from tests.receiver import Receiver
from tests.workflows.jobs import Act, fail, plan, stage, succeed
from workers.errors import ConfigurationError
from workers.registry import WORKFLOWS
from workers.settings import Settings, load_settings
from workers.telemetry import start_tracing
from workers.tracing import Tracing
from workflows import naming
from workflows.failures import FailureCode

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


class Traced:
    """A tracer whose spans stay in memory."""

    def __init__(self, sample_ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(self._exporter, process="test", version="1", sample_ratio=sample_ratio)

    def spans(self) -> Sequence[ReadableSpan]:
        """What was exported."""
        self.tracing.close()
        return self._exporter.get_finished_spans()

    def client(self, client: Client) -> Client:
        """The same client with traces on."""
        config = client.config()
        config["interceptors"] = [self.tracing.interceptor]
        return Client(**config)


async def history_of(client: Client, *acts: Act) -> WorkflowHistory:
    """The history of one task."""
    job = plan()
    async with stage(client, job, *acts) as scene:
        handle = await scene.start(job)
        with contextlib.suppress(WorkflowFailureError):
            await handle.result()
        delivery = client.get_workflow_handle(naming.callback_id(job.task_id))
        await delivery.result()
        return await handle.fetch_history()


def commands(history: WorkflowHistory) -> list[str]:
    """Kinds of the events that commands made, in order."""
    shown = (
        "SCHEDULED",
        "TIMER_STARTED",
        "INITIATED",
        "UPSERT",
        "PROPERTIES_MODIFIED",
        "EXECUTION_COMPLETED",
        "EXECUTION_FAILED",
    )
    names = [EventType.Name(event.event_type) for event in history.events]
    return [name for name in names if any(part in name for part in shown) and "WORKFLOW_TASK" not in name]


@pytest.mark.parametrize("acts", [(succeed(),), (fail(FailureCode.OUT_OF_MEMORY),)], ids=["success", "failure"])
async def test_a_traced_task_sends_the_same_commands_and_replays_with_traces_off(
    client: Client, acts: tuple[Act, ...]
) -> None:
    traced = Traced()
    with_traces = await history_of(traced.client(client), *acts)
    without = await history_of(client, *acts)
    assert commands(with_traces) == commands(without)
    assert {span.name for span in traced.spans()} >= {"RunWorkflow:GenerationWorkflow", "RunActivity:generate_clip"}
    for history in (with_traces, without):
        await Replayer(workflows=WORKFLOWS).replay_workflow(history)
        await Replayer(workflows=WORKFLOWS, interceptors=[Traced().tracing.interceptor]).replay_workflow(history)


async def test_a_failure_is_exported_without_its_words(client: Client) -> None:
    traced = Traced()
    await history_of(traced.client(client), fail(FailureCode.OUT_OF_MEMORY, "a secret prompt"))
    spans = traced.spans()
    (attempt,) = [span for span in spans if span.name == "RunActivity:generate_clip"]
    assert attempt.status.status_code is StatusCode.ERROR
    assert attempt.status.description is None
    assert (attempt.attributes or {})["error.type"] == "temporalio.exceptions.ApplicationError"
    for span in spans:
        assert "secret" not in span.to_json()


async def answer(traced: Traced, path: str, *, headers: dict[str, str] | None = None, status: int = 200) -> Scope:
    """One request through the middleware; the scope that the application saw."""
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["span"] = trace.get_current_span().get_span_context()
        seen.append(scope)
        scope["reelgate.route"] = "/api/v1/things/{id}"
        await send({"type": "http.response.start", "status": status, "headers": []})

    await run(RequestTracing(app, tracer=traced.tracing.tracer), path, headers or {})
    return seen[0]


async def run(app: ASGIApp, path: str, headers: dict[str, str]) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        pass

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await app({"type": "http", "method": "GET", "path": path, "headers": raw}, receive, send)


async def test_a_request_goes_on_with_the_trace_of_its_client_and_is_named_by_its_route() -> None:
    traced = Traced()
    scope = await answer(traced, "/api/v1/things/7", headers={"traceparent": TRACEPARENT, "tracestate": "x=words"})
    (span,) = traced.spans()
    assert span.name == "GET /api/v1/things/{id}"
    assert span.context is not None
    assert (span.context.trace_id, span.context.span_id) == (int(TRACE_ID, 16), scope["span"].span_id)
    assert not span.context.trace_state
    assert dict(span.attributes or {}) == {
        "http.request.method": "GET",
        "http.route": "/api/v1/things/{id}",
        "http.response.status_code": 200,
    }


@pytest.mark.parametrize("sent", ["", "00-zz-11-01", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
async def test_a_request_without_a_usable_trace_starts_one(sent: str) -> None:
    traced = Traced()
    await answer(traced, "/api/v1/things/7", headers={"traceparent": sent}, status=503)
    (span,) = traced.spans()
    assert span.parent is None
    assert span.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_probes_start_no_trace(path: str) -> None:
    traced = Traced()
    scope = await answer(traced, path)
    assert not scope["span"].is_valid
    assert traced.spans() == ()


async def test_a_client_cannot_make_us_keep_more_traces_than_we_want() -> None:
    traced = Traced(sample_ratio=0.0)
    scope = await answer(traced, "/api/v1/things/7", headers={"traceparent": TRACEPARENT})
    assert not scope["span"].trace_flags.sampled
    assert traced.spans() == ()


async def test_requests_at_the_same_time_keep_to_their_own_traces() -> None:
    traced = Traced()
    scopes = await asyncio.gather(*(answer(traced, f"/api/v1/things/{number}") for number in range(20)))
    assert len({scope["span"].trace_id for scope in scopes}) == 20
    assert not trace.get_current_span().get_span_context().is_valid


class TestSettings:
    def test_traces_are_off_by_default(self) -> None:
        assert start_tracing(Settings(), process="api") is None

    def test_a_missing_package_is_named_with_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "workers.tracing", None)
        with pytest.raises(ConfigurationError, match=r"REELGATE_TRACE_EXPORTER=console needs the extra `otel`"):
            start_tracing(Settings(trace_exporter="console"), process="api")

    def test_a_file_that_cannot_be_written_is_named_with_its_setting(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        settings = Settings(trace_exporter="file", trace_file=tmp_path / "file" / "traces.jsonl")
        with pytest.raises(ConfigurationError, match="REELGATE_TRACE_FILE"):
            start_tracing(settings, process="api")

    @pytest.mark.parametrize(("name", "value"), [("trace_exporter", "jaeger"), ("trace_sample_ratio", 1.5)])
    def test_a_wrong_value_is_named(self, name: str, value: object) -> None:
        with pytest.raises(ConfigurationError, match=f"REELGATE_{name.upper()}"):
            load_settings(**{name: value})

    async def test_otlp_sends_to_the_standard_address(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with Receiver() as receiver:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url_of(""))
            tracing = start_tracing(Settings(trace_exporter="otlp"), process="api")
            assert tracing is not None
            tracing.tracer.start_span("one").end()
            closing = asyncio.create_task(asyncio.to_thread(tracing.close))
            (request,) = await receiver.wait_for(1, timeout=30)
            await closing
        assert request.path == "/v1/traces"
        assert b"reelgate-api" in request.body
