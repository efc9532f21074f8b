"""The HTTP application: parts built once in the lifespan, middleware, routers, problems in OpenAPI.

The process talks to Temporal and the store and does no generation work; it imports no torch, diffusers, numpy or av.
"""

from __future__ import annotations

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
from api.middleware import BodyLimit, RequestContext
from api.problem_handlers import install_problem_handlers
from api.problems import Problem
from api.request_guard import RequestGuard
from api.routes import (
    batches,
    callbacks,
    codec,
    console,
    events,
    fleet,
    health,
    media,
    models,
    quota,
    task_actions,
    tasks,
)
from api.signature_check import SignatureCheck
from api.state import AppState, build_gateway
from workers.connection import connect
from workers.links import link_secret, links_from
from workers.registry import guarded_client, key_ring, object_store
from workers.settings import Settings

_REF_TEMPLATE: Final = "#/components/schemas/{model}"


def create_app(settings: Settings, *, client: Client | None = None, admission: Admission | None = None) -> FastAPI:
    """The API of one process.

    Args:
        settings: of this process.
        client: a connected client; None connects when the application starts.
        admission: who may submit; None: the limits of the settings' tiers.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[AppState]:
        async with guarded_client(settings) as image_hosts:
            gateway = build_gateway(
                settings,
                client=client or await connect(settings),
                store=object_store(settings),
                links=links_from(settings),
                cursors=Cursors(link_secret(settings)),
                catalogue=load_catalogue(settings.models_file, extra_builtin=settings.extra_models),
                egress=settings.egress_policy(),
                fetch_image=guarded_fetch(image_hosts, timeout=settings.image_fetch_seconds),
                admission=admission,
            )
            keys = key_ring(settings)
            try:
                yield AppState(gateway=gateway, keys=keys, signatures=SignatureCheck(keys))
            finally:
                await gateway.fleet.aclose()

    app = FastAPI(
        title="Reelgate",
        summary="Durable gateway for text-to-video generation",
        version=version("reelgate"),
        lifespan=lifespan,
        redoc_url=None,
    )
    # The last one added is the first one passed.
    app.add_middleware(BodyLimit, max_bytes=settings.max_request_bytes)
    app.add_middleware(KnownAnswers)
    app.add_middleware(
        RequestGuard,
        rate_per_second=settings.request_rate_per_second,
        burst=settings.request_burst,
        trusted_proxies=settings.trusted_proxies,
    )
    app.add_middleware(RequestContext, https=settings.public_url.startswith("https://"))
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
        health,
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
