"""The request-rate guard in front of every route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from api.app import create_app
from api.request_guard import RequestGuard
from tests.api.conftest import running_stand
from tests.api.stand import Stand, http_client
from tests.api.test_problems import assert_problem
from workers.settings import Settings

RATE, BURST = 2.0, 8
WINDOW = 4
"""Seconds: the requests of one test fit in on a loaded machine."""


@pytest_asyncio.fixture(scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    folder = tmp_path_factory.mktemp("guarded")
    async with running_stand(
        folder, request_rate_per_second=RATE, request_burst=BURST, trusted_proxies=("127.0.0.1", "10.1.0.0/16")
    ) as stand:
        yield stand


def from_address(stand: Stand, address: str, token: str | None = None) -> httpx.AsyncClient:
    """A client whose proxy says where it is."""
    headers = {"X-Forwarded-For": address, **({"Authorization": f"Bearer {token}"} if token else {})}
    return http_client(f"{stand.url}/api/v1", headers)


async def statuses(http: httpx.AsyncClient, count: int, path: str = "/models") -> list[int]:
    return [reply.status_code for reply in await asyncio.gather(*(http.get(path) for _ in range(count)))]


async def test_a_key_over_its_rate_is_refused_and_served_again_when_it_was_told(guarded: Stand) -> None:
    async with from_address(guarded, "192.0.2.1", guarded.keys["user"]) as http:
        first = await http.get("/models")
        assert first.headers["ratelimit-policy"] == f'"requests";q={BURST};w={WINDOW}'
        assert first.headers["ratelimit"] == f'"requests";r={BURST - 1};t={WINDOW}'
        rest = await statuses(http, BURST + 4)
        assert (rest.count(200), rest.count(429)) == (BURST - 1, 5)
        refused = await http.get("/models")
        assert_problem(refused, 429, "RATE_LIMITED")
        assert refused.headers["ratelimit"].startswith('"requests";r=0;t=')
        await asyncio.sleep(int(refused.headers["retry-after"]))
        assert (await http.get("/models")).status_code == 200


async def test_keys_do_not_share_a_rate_even_from_one_address(guarded: Stand) -> None:
    async with (
        from_address(guarded, "192.0.2.2", guarded.keys["free"]) as storm,
        from_address(guarded, "192.0.2.2", guarded.keys["operator"]) as calm,
    ):
        assert 429 in await statuses(storm, BURST + 1)
        assert (await calm.get("/models")).status_code == 200


async def test_made_up_keys_share_the_rate_of_their_address(guarded: Stand) -> None:
    codes = []
    for number in range(BURST + 2):
        async with from_address(guarded, "192.0.2.3", f"rg_{'x' * 8}_{number:043d}") as stranger:
            codes.append((await stranger.get("/models")).status_code)
    assert codes == [401] * BURST + [429] * 2


async def test_an_address_is_what_the_nearest_untrusted_proxy_says(guarded: Stand) -> None:
    async with from_address(guarded, "198.51.100.9, 203.0.113.7, 10.1.2.3") as claimed:
        assert (await statuses(claimed, BURST + 1)).count(429) == 1
    async with from_address(guarded, "203.0.113.7") as same:
        assert (await same.get("/models")).status_code == 429
    async with from_address(guarded, "198.51.100.9") as other:
        assert (await other.get("/models")).status_code == 401


async def test_an_ipv6_network_is_one_address(guarded: Stand) -> None:
    async with from_address(guarded, "2001:db8:0:1::1") as one, from_address(guarded, "2001:db8:0:1:ffff::2") as two:
        assert (await statuses(one, BURST + 1)).count(429) == 1
        assert (await two.get("/models")).status_code == 429


async def test_health_is_never_refused_and_everything_else_is_guarded(guarded: Stand) -> None:
    async with http_client(guarded.url, {"X-Forwarded-For": "192.0.2.5"}) as http:
        assert set(await statuses(http, BURST * 3, "/healthz")) == {200}
        assert (await statuses(http, BURST + 2, "/no/such/path")).count(429) == 2
        assert (await http.get("/openapi.json")).status_code == 429
        assert "ratelimit" not in (await http.get("/healthz")).headers


async def test_without_trusted_proxies_nobody_is_believed(guarded: Stand) -> None:
    guard = RequestGuard(create_app(guarded.settings), rate_per_second=0.1, burst=1)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=guard, client=("192.0.2.6", 1)), base_url="http://test"
    ) as http:
        first = await http.get("/no", headers={"X-Forwarded-For": "192.0.2.7"})
        second = await http.get("/no", headers={"X-Forwarded-For": "192.0.2.8"})
    assert (first.status_code, second.status_code) == (404, 429)


def test_a_proxy_that_is_no_address_is_a_wrong_setting() -> None:
    with pytest.raises(ValueError, match="trusted_proxies"):
        Settings.model_validate({"data_dir": Path("unused"), "trusted_proxies": "proxy.example"})
