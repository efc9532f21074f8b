"""A clip past its expiry: the task says so, and a sweep removes it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from temporalio.testing import ActivityEnvironment

from activities.artifacts import ArtifactRepository
from activities.retention import Retention
from tests.api.stand import PlayedGeneration, Stand, http_client, until
from tests.api.test_problems import assert_problem
from tests.api.test_reading import submit, time_of
from workflows.tasks import RemoveExpiredInput, RetentionArea

KEPT = timedelta(seconds=6)


async def test_a_task_says_when_its_clip_has_expired_and_the_sweep_takes_it(
    stand: Stand, http: httpx.AsyncClient, played: PlayedGeneration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(played, "_artifacts", ArtifactRepository(stand.store, retention=KEPT))
    task = await submit(http, "short lived")
    await until(http, task["task_id"], status="SUCCEEDED", is_terminal=True)
    path = f"/tasks/{task['task_id']}"
    fresh = await http.get(path)
    link = fresh.json()["result_url"]
    assert fresh.json()["poster_url"] is not None
    assert (await http.get(f"{path}/video")).status_code == 200

    expires_at = time_of(fresh.json()["result"]["expires_at"])
    await asyncio.sleep((expires_at - datetime.now(UTC)).total_seconds() + 0.1)
    expired = await http.get(path, headers={"If-None-Match": fresh.headers["etag"]})
    assert expired.status_code == 200, "the answer has changed, whatever was in memory"
    read = expired.json()
    assert (read["status"], read["result_url"], read["poster_url"]) == ("SUCCEEDED", None, None)
    assert time_of(read["result"]["expires_at"]) == expires_at
    async with http_client() as anyone:
        assert_problem(await anyone.get(link), 410, "RESULT_EXPIRED")
    assert_problem(await http.get(f"{path}/video"), 410, "RESULT_EXPIRED")
    assert_problem(await http.get(f"{path}/poster"), 410, "RESULT_EXPIRED")

    left = {info.key async for info in stand.store.list("artifacts")}
    sweep = Retention(stand.store, retention=stand.settings.retention)
    await ActivityEnvironment().run(sweep.remove_expired, RemoveExpiredInput(area=RetentionArea.ARTIFACTS))
    removed = left - {info.key async for info in stand.store.list("artifacts")}
    assert len(removed) == 3, "clip, poster and manifest, and nobody else's"
