"""GET /tasks/{id}/video and /poster: whole, in ranges, by link or by key, and gone when gone."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import pytest_asyncio
from pydantic import SecretStr

from tests.api.stand import POSTER, VIDEO, PlayedGeneration, Stand, http_client, listening, serving, until
from tests.api.test_problems import assert_problem, data_url, png
from tests.object_stores import serving_s3
from workers.links import links_from
from workers.registry import object_store


@pytest_asyncio.fixture
async def task(http: httpx.AsyncClient, played: PlayedGeneration) -> dict[str, Any]:
    """A succeeded task."""
    task_id = (await http.post("/tasks", json={"prompt": "a red circle"})).json()["task_id"]
    return await until(http, task_id, status="SUCCEEDED")


async def test_who_has_the_link_needs_no_key(task: dict[str, Any]) -> None:
    async with http_client() as anyone:
        video, poster = await anyone.get(task["result_url"]), await anyone.get(task["poster_url"])
    assert (video.status_code, video.content, video.headers["content-type"]) == (200, VIDEO, "video/mp4")
    assert (poster.status_code, poster.content, poster.headers["content-type"]) == (200, POSTER, "image/webp")
    assert hashlib.sha256(video.content).hexdigest() == task["result"]["sha256"]
    assert video.headers["etag"] == f'"{task["result"]["sha256"]}"'
    assert video.headers["accept-ranges"] == "bytes"
    assert video.headers["content-disposition"] == f'inline; filename="{task["task_id"]}.mp4"'


async def test_the_owners_key_opens_it_and_a_strangers_does_not(
    http: httpx.AsyncClient, stranger: httpx.AsyncClient, task: dict[str, Any]
) -> None:
    path = f"/tasks/{task['task_id']}/video"
    assert (await http.get(path)).content == VIDEO
    assert_problem(await stranger.get(path), 404, "TASK_NOT_FOUND")


async def test_links_that_were_tampered_with_are_refused(http: httpx.AsyncClient, task: dict[str, Any]) -> None:
    query = {name: values[0] for name, values in parse_qs(urlsplit(task["result_url"]).query).items()}
    base = f"{task['links']['self']}"
    async with http_client() as anyone:
        for path, change in (
            ("/video", {"sig": "0" * 64}),
            ("/video", {"exp": str(int(query["exp"]) + 1)}),
            ("/video", {"exp": "soon"}),
            ("/video", {"sig": "é"}),
            ("/poster", {}),
        ):
            assert_problem(await anyone.get(base + path, params={**query, **change}), 401, "UNAUTHENTICATED")
        assert_problem(await anyone.get(f"{base}/video", params={"sig": query["sig"]}), 401, "UNAUTHENTICATED")
    # The owner's key counts even beside a broken link.
    assert (await http.get(f"/tasks/{task['task_id']}/video", params={**query, "sig": "x"})).status_code == 200


async def test_an_expired_link_says_so(stand: Stand, task: dict[str, Any]) -> None:
    url = links_from(stand.settings).video_url(task["task_id"], datetime.now(UTC) - timedelta(seconds=5))
    async with http_client() as anyone:
        assert_problem(await anyone.get(url), 410, "RESULT_EXPIRED")


@pytest.mark.parametrize(
    ("value", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=0-99", 0, 100),
        ("bytes=100-", 100, len(VIDEO)),
        ("bytes=-7", len(VIDEO) - 7, len(VIDEO)),
        ("bytes=-999999", 0, len(VIDEO)),
        ("bytes=10-999999", 10, len(VIDEO)),
    ],
)
async def test_a_range_is_206(http: httpx.AsyncClient, task: dict[str, Any], value: str, start: int, end: int) -> None:
    reply = await http.get(f"/tasks/{task['task_id']}/video", headers={"Range": value})
    assert (reply.status_code, reply.content) == (206, VIDEO[start:end])
    assert reply.headers["content-range"] == f"bytes {start}-{end - 1}/{len(VIDEO)}"
    assert reply.headers["content-length"] == str(end - start)


@pytest.mark.parametrize("value", ["bytes=0-1,5-6", "items=0-1", "bytes=5-2", "bytes=x-", "bytes=-"])
async def test_what_is_no_single_range_is_ignored(http: httpx.AsyncClient, task: dict[str, Any], value: str) -> None:
    reply = await http.get(f"/tasks/{task['task_id']}/video", headers={"Range": value})
    assert (reply.status_code, reply.content) == (200, VIDEO)


@pytest.mark.parametrize("value", [f"bytes={len(VIDEO)}-", "bytes=-0"])
async def test_a_range_behind_the_end_is_416(http: httpx.AsyncClient, task: dict[str, Any], value: str) -> None:
    reply = await http.get(f"/tasks/{task['task_id']}/video", headers={"Range": value})
    assert_problem(reply, 416, "RANGE_NOT_SATISFIABLE")
    assert reply.headers["content-range"] == f"bytes */{len(VIDEO)}"


async def test_if_range_decides_between_part_and_whole(http: httpx.AsyncClient, task: dict[str, Any]) -> None:
    path = f"/tasks/{task['task_id']}/video"
    head = await http.head(path)
    etag, modified = head.headers["etag"], head.headers["last-modified"]
    for if_range, status in (
        (etag, 206),
        (modified, 206),
        ('"other"', 200),
        (f"W/{etag}", 200),
        ("Sat, 31 Jan 2026 12:00:00 GMT", 200),
        ("nonsense", 200),
    ):
        reply = await http.get(path, headers={"Range": "bytes=0-9", "If-Range": if_range})
        assert (reply.status_code, len(reply.content)) == (status, 10 if status == 206 else len(VIDEO)), if_range


async def test_head_and_validators_cost_no_body(http: httpx.AsyncClient, task: dict[str, Any]) -> None:
    path = f"/tasks/{task['task_id']}/video"
    head = await http.head(path)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(VIDEO)))
    part = await http.head(path, headers={"Range": "bytes=0-9"})
    assert (part.status_code, part.headers["content-length"]) == (206, "10")
    unchanged = await http.get(path, headers={"If-None-Match": head.headers["etag"]})
    assert (unchanged.status_code, unchanged.content) == (304, b"")


async def test_a_removed_clip_is_410(stand: Stand, http: httpx.AsyncClient, task: dict[str, Any]) -> None:
    keys = [info.key async for info in stand.store.list("artifacts")]
    sizes = {key: len(await stand.store.get(key)) for key in keys if key.endswith("video.mp4")}
    assert len(VIDEO) in sizes.values()
    await stand.store.delete(keys)
    async with http_client() as anyone:
        assert_problem(await anyone.get(task["result_url"]), 410, "RESULT_EXPIRED")
    assert_problem(await http.get(f"/tasks/{task['task_id']}/poster"), 410, "RESULT_EXPIRED")


async def test_before_the_end_it_is_409_and_after_a_failure_404(
    http: httpx.AsyncClient, played: PlayedGeneration
) -> None:
    running = (await http.post("/tasks", json={"prompt": "hold on"})).json()["task_id"]
    reply = await http.get(f"/tasks/{running}/video")
    assert_problem(reply, 409, "TASK_NOT_TERMINAL")
    assert reply.headers["retry-after"] == "2"
    failed = (await http.post("/tasks", json={"prompt": "fail please"})).json()["task_id"]
    await until(http, failed, status="FAILED")
    assert_problem(await http.get(f"/tasks/{failed}/video"), 404, "RESULT_NOT_FOUND")


async def test_a_store_that_signs_serves_the_bytes_itself(
    stand: Stand, task: dict[str, Any], http: httpx.AsyncClient, tmp_path: Path
) -> None:
    with serving_s3(tmp_path) as s3, listening() as sock:
        options = {name: SecretStr(value) for name, value in s3.options().items()}
        settings = stand.settings.model_copy(update={"store_url": s3.new_root(), "store_options": options})
        store = object_store(settings)
        for key in [info.key async for info in stand.store.list("artifacts")]:
            await store.put(key, await stand.store.get(key), content_type="video/mp4")
        with serving(settings, sock) as url:
            link = task["result_url"].replace(stand.url, url)
            redirect = await http.get(link)
            assert (redirect.status_code, redirect.headers["cache-control"]) == (307, "no-store")
            async with http_client() as anyone:
                direct = await anyone.get(redirect.headers["location"], headers={"Range": "bytes=1-3"})
            assert direct.content == VIDEO[1:4]
            head = await http.head(link)
            assert (head.status_code, head.headers["content-length"]) == (200, str(len(VIDEO)))
            s3.kill()
            image = {"prompt": "x", "model": "tiny-wan-i2v", "image": data_url(png())}
            gone, refused = await asyncio.gather(http.head(link), http.post(f"{url}/api/v1/tasks", json=image))
            assert gone.status_code == 503
            assert_problem(refused, 503, "STORAGE_UNAVAILABLE")
