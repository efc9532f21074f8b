"""The HTTP application: parts built once in the lifespan, middleware, routers, problems in OpenAPI.

The process talks to Temporal and the store and does no generation work; it imports no torch, diffusers, numpy or av.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from temporalio.client import Client

from activities.inference.catalogue import load_catalogue
from api.admission import Admission
from api.cursors import Cursors
from api.images import guarded_fetch
from api.known_answers import KnownAnswers
from api.metrics import ApiMetrics, MetricsPage
from api.middleware import BodyLimit, RequestContext
from api.problem_handlers import install_problem_handlers
from api.problems import Problem
from api.queue_report import QueueReport
from api.request_guard import RequestGuard
from api.request_metrics import RequestMetrics
from api.routes import (
    batches,
    callbacks,
    codec,
    console,
    events,
    fleet,
    health,
    media,
    metrics,
    models,
    quota,
    redrive,
    task_actions,
    tasks,
)
from api.signature_check import SignatureCheck
from api.state import AppState, build_gateway
from workers.connection import connect
from workers.links import link_secret, links_from
from workers.registry import guarded_client, key_ring, object_store
from workers.settings import Settings
from workers.telemetry import start_tracing

_REF_TEMPLATE: Final = "#/components/schemas/{model}"


def create_app(settings: Settings, *, client: Client | None = None, admission: Admission | None = None) -> FastAPI:
    """The API of one process.

    Args:
        settings: of this process.
        client: a connected client; None connects when the application starts.
        admission: who may submit; None: the limits of the settings' tiers.
    """
    measured, tracing = ApiMetrics(settings), start_tracing(settings, process="api")

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[AppState]:
        async with guarded_client(settings) as image_hosts:
            gateway = build_gateway(
                settings,
                client=client or await connect(settings, interceptors=[tracing.interceptor] if tracing else []),
                store=object_store(settings),
                links=links_from(settings),
                cursors=Cursors(link_secret(settings)),
                catalogue=load_catalogue(settings.models_file, extra_builtin=settings.extra_models),
                egress=settings.egress_policy(),
                fetch_image=guarded_fetch(image_hosts, timeout=settings.image_fetch_seconds),
                admission=admission,
                count_admission=measured.count_admission,
            )
            queues = QueueReport(
                gateway.client,
                queues=gateway.queues,
                fleet=gateway.fleet,
                pools=(spec.pool for spec in gateway.catalogue),
            )
            page = MetricsPage(measured.registry, queues=queues, readiness=gateway.readiness)
            keys = key_ring(settings)
            try:
                yield AppState(gateway=gateway, keys=keys, signatures=SignatureCheck(keys), metrics_page=page)
            finally:
                await gateway.fleet.aclose()
                if tracing is not None:
                    await asyncio.to_thread(tracing.close)

    app = FastAPI(
        title="Reelgate",
        summary="Durable gateway for text-to-video generation",
        version=version("reelgate"),
        lifespan=lifespan,
        redoc_url=None,
        # A redirect would repeat the `Host` it was sent, and behind TLS lead a key and a prompt to plain HTTP.
        redirect_slashes=False,
    )
    # The last one added is the first one passed.
    app.add_middleware(BodyLimit, max_bytes=settings.max_request_bytes)
    app.add_middleware(KnownAnswers)
    app.add_middleware(
        RequestGuard,
        rate_per_second=settings.request_rate_per_second,
        burst=settings.request_burst,
        trusted_proxies=settings.trusted_proxies,
        on_refusal=measured.count_guard_refusal,
    )
    app.add_middleware(RequestContext, https=settings.public_url.startswith("https://"))
    if tracing is not None:
        from api.request_tracing import RequestTracing  # noqa: PLC0415 - an extra

        app.add_middleware(RequestTracing, tracer=tracing.tracer)
    app.add_middleware(RequestMetrics, metrics=measured)
    install_problem_handlers(app)
    for module in (
        batches,
        tasks,
        task_actions,
        callbacks,
        media,
        models,
        fleet,
        quota,
        redrive,
        health,
        metrics,
        events,
        codec,
        console,
    ):
        app.include_router(module.router)
    app.openapi = _openapi_of(app)  # type: ignore[method-assign]  # FastAPI's documented way to extend the schema
    return app


def _openapi_of(app: FastAPI) -> Any:  # noqa: ANN401 - the type of the attribute it replaces
    """FastAPI's schema, cached, with the shape of problems in its components."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, summary=app.summary, version=app.version, routes=app.routes)
            components = schema.setdefault("components", {}).setdefault("schemas", {})
            problem = Problem.model_json_schema(ref_template=_REF_TEMPLATE, mode="serialization")
            for name, definition in problem.pop("$defs", {}).items():
                components.setdefault(name, definition)
            components["Problem"] = problem
            app.openapi_schema = schema
        return app.openapi_schema

    return openapi
