"""Signed requests over HTTP: instead of a bearer key, once, and only as they were signed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio

from api.cli_client import Access, Gateway, MissingKeyError
from api.request_signing import RequestSigner
from tests.api.stand import NO_TLS, Stand, http_client, listening, serving
from tests.api.test_problems import assert_problem
from workers.keys import Scope
from workers.keys_admin import create_key

DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"


@pytest_asyncio.fixture(scope="module")
async def signing_key(quiet: Stand) -> str:
    """A service key that signs, known to the running API."""
    key = create_key(quiet.settings.keys_file, tenant="acme", scope=Scope.SERVICE, signing=True).key
    await quiet.keys_reloaded()
    return f"{key.key_id}:{key.signing_secret}"


@pytest_asyncio.fixture
async def signed(quiet: Stand, signing_key: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client that signs, for an end user of its own."""
    async with httpx.AsyncClient(
        base_url=f"{quiet.url}/api/v1",
        auth=RequestSigner(signing_key),
        headers={"X-User-Id": f"signer-{uuid4().hex[:8]}"},
        verify=NO_TLS,
    ) as client:
        yield client


async def test_a_signed_request_does_what_a_bearer_key_does(quiet: Stand, signed: httpx.AsyncClient) -> None:
    reply = await signed.post("/tasks", json={"prompt": "a red circle", "labels": ["ä"]})
    assert reply.status_code == 202, reply.text
    task_id = reply.json()["task_id"]
    assert (await signed.get(f"/tasks/{task_id}")).json()["status"] == "QUEUED"
    assert (await signed.get("/tasks", params={"limit": 5, "status": "QUEUED"})).status_code == 200
    assert (await signed.get(f"/tasks/{task_id}/video")).status_code == 409
    user = signed.headers["x-user-id"]
    async with quiet.user(user) as bearer:
        assert (await bearer.get(f"/tasks/{task_id}")).status_code == 200


async def test_the_same_request_again_is_refused_here_and_finds_the_same_task_on_another_replica(
    quiet: Stand, signed: httpx.AsyncClient
) -> None:
    first = await signed.post("/tasks", json={"prompt": "a caught request"})
    caught = first.request
    async with http_client() as thief:
        again = await thief.post(caught.url, content=caught.content, headers=caught.headers)
        assert_problem(again, 401, "UNAUTHENTICATED")
        assert "nonce was used" in again.json()["detail"]
        with listening() as sock, serving(quiet.settings, sock) as other:
            elsewhere = await thief.post(f"{other}/api/v1/tasks", content=caught.content, headers=caught.headers)
    assert elsewhere.status_code == 200, elsewhere.text
    assert elsewhere.json()["task_id"] == first.json()["task_id"]


async def test_what_was_changed_on_the_way_is_refused_and_does_nothing(quiet: Stand, signed: httpx.AsyncClient) -> None:
    request = signed.build_request("POST", "/tasks", json={"prompt": "pay bob"})
    honest = next(signed.auth.auth_flow(request))  # type: ignore[union-attr]  # the client of this fixture has one
    headers = dict(honest.headers)
    changes: list[dict[str, object]] = [
        {"content": honest.content.replace(b"bob", b"eve")},
        {"content": b""},
        {"headers": {**headers, "x-user-id": "eve"}},
        {"headers": {**headers, "idempotency-key": "eve"}},
        {"url": f"{honest.url}?a=b"},
    ]
    async with http_client() as thief:
        for change in changes:
            sent = {"method": "POST", "url": str(honest.url), "content": honest.content, "headers": headers, **change}
            if "content" in change:
                sent["headers"] = {name: value for name, value in headers.items() if name != "content-length"}
            assert_problem(await thief.request(**sent), 401, "UNAUTHENTICATED")  # type: ignore[arg-type]  # above
    for user in ("eve", signed.headers["x-user-id"]):
        async with quiet.user(user) as reader:
            assert (await reader.get("/tasks")).json()["items"] == []


async def test_a_wrong_signature_is_refused_before_a_byte_of_the_body_is_read(quiet: Stand, signing_key: str) -> None:
    key_id = signing_key.partition(":")[0]
    head = (
        "POST /api/v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n"
        f"Authorization: HMAC-SHA256 key={key_id},timestamp=1,nonce={'n' * 16},body={'0' * 64},"
        f"signature={'0' * 64}\r\n\r\n"
    )
    host, _, port = quiet.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode())
    async with asyncio.timeout(5):
        status = await reader.readline()
    writer.close()
    assert b" 401 " in status


async def test_a_signed_body_over_the_limit_is_413(quiet: Stand, signed: httpx.AsyncClient) -> None:
    body = b"x" * (quiet.settings.max_request_bytes + 1)
    assert_problem(await signed.post("/tasks", content=body), 413, "BODY_TOO_LARGE")


async def test_the_command_line_signs(quiet: Stand, tmp_path: Path) -> None:
    key = create_key(quiet.settings.keys_file, tenant="cli", scope=Scope.USER, signing=True).key
    await quiet.keys_reloaded()
    environment = {
        "REELGATE_URL": quiet.url,
        "REELGATE_SIGNING_KEY": f"{key.key_id}:{key.signing_secret}",
        "REELGATE_DATA_DIR": str(tmp_path),
    }
    access = Access.find(environment)
    assert str(key.signing_secret) not in repr(access)

    def ask() -> str:
        with Gateway(access) as gateway:
            return gateway.submit({"prompt": "signed"})[0].status

    assert await asyncio.to_thread(ask) == "QUEUED"
    with pytest.raises(MissingKeyError, match="REELGATE_SIGNING_KEY") as raised:
        Gateway(Access.find({**environment, "REELGATE_SIGNING_KEY": "hunter2"}))
    assert "hunter2" not in str(raised.value)


async def test_the_documented_example_runs(quiet: Stand) -> None:
    key = create_key(quiet.settings.keys_file, tenant="reader", scope=Scope.USER, signing=True).key
    await quiet.keys_reloaded()
    (example,) = (
        block for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL) if "HMAC" in block
    )
    environment = {
        **os.environ,
        "REELGATE_URL": quiet.url,
        "REELGATE_SIGNING_KEY": f"{key.key_id}:{key.signing_secret}",
    }
    run = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", example],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["status"] == "QUEUED"
