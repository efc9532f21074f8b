"""The codec server over HTTP: who may decode, from where, and what does not decode."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import SecretStr
from structlog.testing import capture_logs
from temporalio.api.common.v1 import Payload

from tests.api.stand import Stand, http_client, listening, serving
from tests.api.test_problems import assert_problem
from workers.codec import CodecKey, EncryptionCodec, codec_from

TOKEN = "a-token-that-nobody-can-guess-0123456789"
WEB_UI = "http://127.0.0.1:8233"
CLEAR = Payload(metadata={"encoding": b"json/plain", "odd": b"\xfb\xff"}, data='{"prompt": "a secret wish ä"}'.encode())


@pytest_asyncio.fixture(scope="module")
async def decoder(quiet: Stand) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an API that has a path token; no key yet."""
    changes = {"codec_path_token": SecretStr(TOKEN), "web_ui_url": WEB_UI}
    with listening() as sock, serving(quiet.settings.model_copy(update=changes), sock) as url:
        async with http_client(f"{url}/api/v1/codec") as client:
            yield client


@pytest.fixture
def operator(quiet: Stand) -> dict[str, str]:
    """Headers of an operator."""
    return {"Authorization": f"Bearer {quiet.keys['operator']}"}


async def sealed(quiet: Stand, payload: Payload = CLEAR) -> Payload:
    return (await codec_from(quiet.settings).encode([payload]))[0]


def as_json(*payloads: Payload) -> dict[str, Any]:
    """As Temporal's own tools send them."""
    return {
        "payloads": [
            {
                "metadata": {name: b64encode(value).decode() for name, value in payload.metadata.items()},
                "data": b64encode(payload.data).decode(),
            }
            for payload in payloads
        ]
    }


async def test_an_operator_reads_what_is_encrypted_and_what_is_not(
    quiet: Stand, decoder: httpx.AsyncClient, operator: dict[str, str]
) -> None:
    plain = Payload(metadata={"encoding": b"json/plain"}, data=b"1")
    reply = await decoder.post("/decode", json=as_json(await sealed(quiet), plain), headers=operator)
    assert reply.status_code == 200, reply.text
    assert reply.json() == as_json(CLEAR, plain)
    assert (await decoder.post("/decode", json={}, headers=operator)).json() == {"payloads": []}


@pytest.mark.parametrize("name", ["user", "service"])
async def test_other_scopes_are_forbidden_and_strangers_unauthenticated(
    quiet: Stand, decoder: httpx.AsyncClient, name: str
) -> None:
    body = as_json(await sealed(quiet))
    headers = {"Authorization": f"Bearer {quiet.keys[name]}"}
    reply = await decoder.post("/decode", json=body, headers=headers)
    assert_problem(reply, 403, "FORBIDDEN")
    reply = await decoder.post("/decode", json=body)
    assert_problem(reply, 401, "UNAUTHENTICATED")


async def test_the_path_token_stands_for_a_key_and_without_the_setting_there_is_no_such_path(
    quiet: Stand, decoder: httpx.AsyncClient
) -> None:
    body = as_json(await sealed(quiet))
    assert (await decoder.post(f"/{TOKEN}/decode", json=body)).json() == as_json(CLEAR)
    for wrong in (TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "%C3%A4" * 10):
        assert_problem(await decoder.post(f"/{wrong}/decode", json=body), 404, "NOT_FOUND")
    async with http_client(f"{quiet.url}/api/v1/codec") as without:
        for token in (TOKEN, "None", ""):
            assert_problem(await without.post(f"/{token}/decode", json=body), 404, "NOT_FOUND")


async def test_there_is_no_way_to_encode(decoder: httpx.AsyncClient, operator: dict[str, str]) -> None:
    for path in ("/encode", f"/{TOKEN}/encode"):
        assert_problem(await decoder.post(path, json=as_json(CLEAR), headers=operator), 404, "NOT_FOUND")


@pytest.mark.parametrize("path", ["/decode", f"/{TOKEN}/decode"])
async def test_a_browser_may_come_from_the_web_ui(
    quiet: Stand, decoder: httpx.AsyncClient, operator: dict[str, str], path: str
) -> None:
    asked = {
        "Origin": WEB_UI,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-namespace",
    }
    preflight = await decoder.options(path, headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == WEB_UI
    assert preflight.headers["access-control-allow-methods"] == "POST"
    allowed = set(preflight.headers["access-control-allow-headers"].split(","))
    assert allowed == {"content-type", "x-namespace", "authorization"}
    reply = await decoder.post(path, json=as_json(await sealed(quiet)), headers={**operator, "Origin": WEB_UI})
    assert reply.json() == as_json(CLEAR)
    assert reply.headers["access-control-allow-origin"] == WEB_UI
    assert reply.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize("path", ["/decode", f"/{TOKEN}/decode"])
@pytest.mark.parametrize(
    "origin",
    ["http://localhost:8233", "https://127.0.0.1:8233", "http://127.0.0.1", f"{WEB_UI}0", "null", "*", f"{WEB_UI}/"],
)
async def test_pages_of_another_origin_get_nothing(
    quiet: Stand, decoder: httpx.AsyncClient, operator: dict[str, str], path: str, origin: str
) -> None:
    headers = {**operator, "Origin": origin}
    for reply in (
        await decoder.options(path, headers=headers),
        await decoder.post(path, json=as_json(await sealed(quiet)), headers=headers),
    ):
        assert_problem(reply, 403, "FORBIDDEN")
        assert "access-control-allow-origin" not in reply.headers
        assert "secret" not in reply.text


async def test_the_web_ui_can_read_why_it_was_refused(decoder: httpx.AsyncClient) -> None:
    reply = await decoder.post("/decode", json={}, headers={"Origin": WEB_UI})
    assert_problem(reply, 401, "UNAUTHENTICATED")
    assert reply.headers["access-control-allow-origin"] == WEB_UI


@pytest.mark.parametrize("damage", ["unknown key", "flipped bit", "short nonce", "no data"])
async def test_what_does_not_decrypt_is_said_with_its_key_id_and_nothing_else(
    quiet: Stand, decoder: httpx.AsyncClient, operator: dict[str, str], damage: str
) -> None:
    payload = await sealed(quiet)
    match damage:
        case "unknown key":
            (payload,) = await EncryptionCodec([CodecKey(key_id="lost", secret=bytes(32))]).encode([CLEAR])
        case "flipped bit":
            payload.data = bytes([payload.data[0] ^ 1]) + payload.data[1:]
        case "short nonce":
            payload.data = payload.data[:5]
        case _:
            payload.data = b""
    reply = await decoder.post("/decode", json=as_json(payload), headers=operator)
    problem = assert_problem(reply, 422, "PAYLOAD_UNREADABLE")
    assert payload.metadata["encryption-key-id"].decode() in str(problem["detail"])
    assert "secret" not in reply.text


@pytest.mark.parametrize("payload", [{"data": "%%%"}, {"metadata": {"encoding": "ä"}}])
async def test_what_is_no_base64_is_refused(
    decoder: httpx.AsyncClient, operator: dict[str, str], payload: dict[str, object]
) -> None:
    reply = await decoder.post("/decode", json={"payloads": [payload]}, headers=operator)
    assert_problem(reply, 422, "VALIDATION_FAILED", payloads="base64")


async def test_the_token_is_not_in_the_access_log(quiet: Stand, decoder: httpx.AsyncClient) -> None:
    with capture_logs() as lines:
        await decoder.post(f"/{TOKEN}/decode", json=as_json(await sealed(quiet)))
        await decoder.post(f"/{TOKEN}/decode/", json={})
        await decoder.post(f"/x/{TOKEN}", json={})
        await decoder.post("/decode", json={})
    paths = [line["path"] for line in lines if line["event"] == "request"]
    assert paths == ["/api/v1/codec/[redacted]/decode"] * 3 + ["/api/v1/codec/decode"]
    assert TOKEN not in str(lines)


def test_the_helper_of_these_tests_is_protobufs_json() -> None:
    (payload,) = as_json(CLEAR)["payloads"]
    assert b64decode(payload["data"]) == CLEAR.data
