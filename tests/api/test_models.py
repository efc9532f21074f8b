"""GET /models, /healthz, /readyz."""

from __future__ import annotations

import asyncio
import re
import time
from datetime import timedelta

import httpx

from api.fleet import Fleet
from tests.api.stand import GPU_SLOTS, Stand, http_client


async def test_models_say_what_they_take_and_that_nobody_serves_them(waiting: httpx.AsyncClient) -> None:
    models = {item["name"]: item for item in (await waiting.get("/models")).json()["items"]}
    assert models["moving-shapes"]["default"]
    assert models["moving-shapes"]["kind"] == "text-to-video"
    assert models["tiny-wan-i2v"]["kind"] == "image-to-video"
    assert "image" in models["tiny-wan-i2v"]["parameters"]["required"]
    assert models["moving-shapes"]["parameters"]["properties"]["width"]["multipleOf"] >= 2
    assert models["moving-shapes"]["serving"] == {"pool": "default", "state": "no_worker", "workers": 0, "slots": 0}


async def test_live_workers_and_their_slots_are_counted(stand: Stand, http: httpx.AsyncClient) -> None:
    deadline = time.monotonic() + 15
    expected = {"pool": "default", "state": "live", "workers": 1, "slots": GPU_SLOTS}
    while (serving := (await http.get("/models")).json()["items"][0]["serving"]) != expected:
        assert time.monotonic() < deadline, serving
        await asyncio.sleep(0.3)


async def test_parallel_readers_of_a_pool_ask_once(stand: Stand) -> None:
    fleet = Fleet(stand.client, heartbeat=timedelta(seconds=1))
    states = await asyncio.gather(*(fleet.pool("default") for _ in range(20)))
    assert all(state is states[0] for state in states)


async def test_health_needs_no_key_and_readiness_looks_at_temporal_and_store(stand: Stand) -> None:
    async with http_client(stand.url) as nobody:
        assert (await nobody.get("/healthz")).json() == {"status": "ok"}
        ready = await nobody.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready", "temporal": "ok", "store": "ok"})
        documentation = await nobody.get("/docs")
        assert documentation.status_code == 200
        policy = documentation.headers["content-security-policy"]
        # Keys are entered there, and its scripts are from elsewhere.
        assert {"default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"} <= set(policy.split("; "))
        for source in re.findall(r'(?:src|href)="(https://[^"]+/)', documentation.text):
            assert source in policy
