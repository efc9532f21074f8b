"""Who may use which route: a walk over all routes of the application, so that new ones are in it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio
from fastapi.routing import iter_route_contexts

from api.app import create_app
from tests.api.stand import Stand, http_client, until
from tests.api.test_problems import assert_problem
from workers.settings import Settings

FOR_OPERATORS = ("/api/v1/codec/decode", "/api/v1/quota", "/api/v1/redrive", "/api/v1/rollout", "/api/v1/workers")
"""Beginnings of the paths that need an operator's key."""
WITHOUT_A_KEY = {
    "/",
    "/console/{name}",
    "/docs",
    "/docs/oauth2-redirect",
    "/openapi.json",
    "/healthz",
    "/readyz",
    "/metrics",
    # The path itself is the secret; `test_codec_server` has its tests.
    "/api/v1/codec/{token}/decode",
}
BODIES: dict[str, object] = {"/api/v1/tasks/{task_id}/cancel": {"mode": "hard"}}
"""Bodies without which a route would refuse whoever asks."""


@dataclass(frozen=True)
class Route:
    """One method of one path."""

    method: str
    path: str

    @property
    def for_operators(self) -> bool:
        return self.path.startswith(FOR_OPERATORS)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def _routes() -> list[Route]:
    found = {
        Route(method, str(context.path))
        for context in iter_route_contexts(create_app(Settings()).routes)
        for method in context.methods or ()
    }
    return sorted((route for route in found if route.method != "OPTIONS"), key=str)


ROUTES = _routes()
LOCKED = [route for route in ROUTES if route.path not in WITHOUT_A_KEY]
OF_A_TASK = [route for route in LOCKED if "{task_id}" in route.path]
OF_A_BATCH = [route for route in LOCKED if "{batch_id}" in route.path]
OPERATOR_ROUTES = [route for route in LOCKED if route.for_operators]

by_route = pytest.mark.parametrize("route", LOCKED, ids=str)


async def ask(client: httpx.AsyncClient, route: Route, **names: str) -> httpx.Response:
    """Ask a route, path parameters filled in."""
    path = re.sub(r"\{(\w+)(?::\w+)?\}", lambda match: names.get(match[1], "x"), route.path)
    return await client.request(route.method, path, json=BODIES.get(route.path))


async def ask_well(client: httpx.AsyncClient, route: Route) -> httpx.Response:
    """Ask a route for operators for what it can do."""
    if route.path.startswith("/api/v1/quota"):
        params = {"tenant": f"nobody-{uuid4().hex[:6]}"}
        return await client.request(route.method, route.path, params=params)
    return await client.request(route.method, route.path, json={} if route.method == "POST" else None)


def assert_refused(reply: httpx.Response, status: int, code: str) -> None:
    assert reply.status_code == status, reply.text
    if reply.request.method != "HEAD":
        assert_problem(reply, status, code)


def strangers(stand: Stand) -> list[dict[str, str]]:
    """Headers of other users: of the same tenant, the tenant itself with all rights, and of another tenant."""
    return [
        {"Authorization": f"Bearer {stand.service_key}", "X-User-Id": "someone-else"},
        {"Authorization": f"Bearer {stand.keys['operator']}"},
        {"Authorization": f"Bearer {stand.keys['user']}"},
    ]


@pytest_asyncio.fixture
async def owned(stand: Stand) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """The owner and a task that ended with a clip."""
    async with stand.user() as owner:
        task_id = (await owner.post("/tasks", json={"prompt": f"mine {uuid4().hex}"})).json()["task_id"]
        await until(owner, task_id, is_terminal=True, status="SUCCEEDED")
        yield owner, task_id


def test_the_walk_sees_the_routes() -> None:
    assert {"GET /api/v1/tasks/{task_id}", "POST /api/v1/tasks", "HEAD /api/v1/tasks/{task_id}/video"} <= {
        str(route) for route in ROUTES
    }
    assert len(OF_A_TASK) >= 11
    assert len(OF_A_BATCH) >= 2
    assert {route.path for route in OPERATOR_ROUTES} >= {"/api/v1/codec/decode", "/api/v1/quota"}
    unknown = {name for route in LOCKED for name in re.findall(r"\{(\w+)", route.path)} - {"task_id", "batch_id"}
    assert not unknown, "a new kind of resource: say here whose it is and who may see it"


@by_route
async def test_nothing_answers_without_a_key(stand: Stand, route: Route) -> None:
    async with http_client(stand.url) as nobody:
        assert_refused(await ask(nobody, route), 401, "UNAUTHENTICATED")


async def test_another_users_task_is_404_on_every_route_and_unharmed(
    stand: Stand, owned: tuple[httpx.AsyncClient, str]
) -> None:
    owner, task_id = owned
    before = (await owner.get(f"/tasks/{task_id}")).json()
    for headers in strangers(stand):
        async with http_client(stand.url, headers) as stranger:
            for route in OF_A_TASK:
                assert_refused(await ask(stranger, route, task_id=task_id), 404, "TASK_NOT_FOUND")
            listed = (await stranger.get("/api/v1/tasks", params={"limit": 100})).json()["items"]
            assert task_id not in [task["task_id"] for task in listed]
    assert (await owner.get(f"/tasks/{task_id}")).json() == before
    assert (await owner.get(f"/tasks/{task_id}/video")).status_code == 200


async def test_every_one_of_those_routes_knows_the_task_for_its_owner(
    stand: Stand, owned: tuple[httpx.AsyncClient, str]
) -> None:
    owner, task_id = owned
    async with http_client(stand.url, owner.headers.raw) as client:
        for route in sorted(OF_A_TASK, key=lambda route: route.method == "DELETE"):
            reply = await ask(client, route, task_id=task_id)
            assert "TASK_NOT_FOUND" not in reply.text, route
            assert reply.status_code not in (401, 403), route


@pytest.mark.parametrize("scope", ["user", "service"])
async def test_operator_routes_are_forbidden_to_other_scopes(stand: Stand, scope: str) -> None:
    headers = {"Authorization": f"Bearer {stand.keys[scope]}"}
    async with http_client(stand.url, headers) as client:
        for route in OPERATOR_ROUTES:
            assert_refused(await ask_well(client, route), 403, "FORBIDDEN")


async def test_only_operator_routes_ask_for_an_operator(stand: Stand) -> None:
    user = {"Authorization": f"Bearer {stand.keys['user']}"}
    operator = {"Authorization": f"Bearer {stand.keys['operator']}"}
    async with http_client(stand.url, user) as client:
        for route in LOCKED:
            if not route.for_operators:
                assert (await ask(client, route, task_id="t" * 27)).status_code != 403, route
    async with http_client(stand.url, operator) as client:
        for route in OPERATOR_ROUTES:
            reply = await ask_well(client, route)
            assert reply.status_code not in (401, 403), (route, reply.text)


async def test_another_users_batch_is_404_on_every_route_and_known_to_its_owner(stand: Stand) -> None:
    async with stand.user() as owner:
        posted = await owner.post("/batches", json={"items": [{"prompt": f"mine {uuid4().hex}"}]})
        assert posted.is_success, posted.text
        batch_id = posted.json()["batch_id"]
        for headers in strangers(stand):
            async with http_client(stand.url, headers) as stranger:
                for route in OF_A_BATCH:
                    assert_refused(await ask(stranger, route, batch_id=batch_id), 404, "BATCH_NOT_FOUND")
                listed = (await stranger.get("/api/v1/batches", params={"limit": 100})).json()["items"]
                assert batch_id not in [batch["batch_id"] for batch in listed]
        assert (await owner.get(f"/batches/{batch_id}")).json()["status"] != "CANCELED"
        async with http_client(stand.url, owner.headers.raw) as client:
            for route in sorted(OF_A_BATCH, key=lambda route: (route.method == "DELETE", route.method != "GET")):
                reply = await ask(client, route, batch_id=batch_id)
                assert "BATCH_NOT_FOUND" not in reply.text, route
                assert reply.status_code not in (401, 403), route
