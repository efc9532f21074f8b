"""Every refusal is a problem+json with a stable code, names fields and rules, and repeats nothing that was sent."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from PIL import Image
from structlog.testing import capture_logs
from temporalio.api.common.v1 import Memo, Payload, WorkflowType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import StartWorkflowExecutionRequest

from tests.api.stand import Stand, http_client
from workers.keys_admin import revoke_key
from workflows import naming

PROMPT = "a red circle moving right"


def assert_problem(reply: httpx.Response, status: int, code: str, **rules: str) -> dict[str, object]:
    """The reply is this problem, and each named field breaks this rule."""
    problem: dict[str, object] = reply.json()
    assert (reply.status_code, problem.get("code")) == (status, code), problem
    assert reply.headers["content-type"] == "application/problem+json"
    assert problem["status"] == status
    assert problem["type"] == f"urn:reelgate:problem:{code.lower().replace('_', '-')}"
    assert problem["title"]
    assert problem["detail"]
    errors = problem.get("errors", [])
    assert isinstance(errors, list)
    found = {(error["field"], error["rule"]) for error in errors}
    assert rules.items() <= found, found
    assert reply.headers["x-request-id"]
    return problem


def png(width: int = 8, height: int = 8, *, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize(
    ("fields", "field", "rule"),
    [
        ({"prompt": ""}, "prompt", "string_too_short"),
        ({"prompt": " \n\u3000"}, "prompt", "not_blank"),
        ({"prompt": "x" * 4_001}, "prompt", "string_too_long"),
        ({"prompt": "a\0b"}, "prompt", "no_nul"),
        ({"prompt": None}, "prompt", "string_type"),
        ({"prompt": 7}, "prompt", "string_type"),
        ({"width": "512"}, "width", "int_type"),
        ({"width": 0}, "width", "greater_than_equal"),
        ({"width": 33}, "width", "multiple_of"),
        ({"width": 15_360}, "width", "maximum"),
        ({"num_frames": 2}, "num_frames", "frame_count"),
        ({"num_inference_steps": 100_000}, "num_inference_steps", "maximum"),
        ({"num_inference_steps": True}, "num_inference_steps", "int_type"),
        ({"fps": 0}, "fps", "greater_than"),
        ({"guidance_scale": -1}, "guidance_scale", "greater_than_equal"),
        ({"seed": -1}, "seed", "greater_than_equal"),
        ({"seed": 2**32}, "seed", "less_than_equal"),
        ({"seed": 1, "regenerate": True}, "regenerate", "excludes_seed"),
        ({"priority": "urgent"}, "priority", "enum"),
        ({"deadline_seconds": 0}, "deadline_seconds", "greater_than_equal"),
        ({"deadline_seconds": 1_801}, "deadline_seconds", "maximum"),
        ({"labels": ["x"] * 17}, "labels", "too_long"),
        ({"labels": [""]}, "labels.0", "string_too_short"),
        ({"labels": ["y" * 65]}, "labels.0", "string_too_long"),
        ({"labels": ["a\0"]}, "labels.0", "no_nul"),
        ({"callback_url": "ftp://example.com/"}, "callback_url", "scheme"),
        ({"callback_url": "https://user:pw@example.com/"}, "callback_url", "userinfo"),
        ({"callback_url": "https://10.0.0.1/"}, "callback_url", "address"),
        ({"callback_url": "https://169.254.169.254/latest"}, "callback_url", "address"),
        ({"callback_url": "https://" + "a" * 2_048}, "callback_url", "string_too_long"),
        ({"callback_events": ["succeeded"]}, "callback_events", "needs_callback_url"),
        ({"callback_url": "https://e.com/", "callback_events": []}, "callback_events", "too_short"),
        ({"callback_url": "https://e.com/", "callback_events": ["failed"] * 2}, "callback_events", "unique"),
        ({"callback_url": "https://e.com/", "callback_events": ["started"]}, "callback_events.0", "enum"),
        ({"steps": 3}, "steps", "extra_forbidden"),
        ({"image": "https://10.0.0.1/cat.png"}, "image", "address"),
        ({"image": "https://user:pw@example.com/cat.png"}, "image", "userinfo"),
        ({"image": "ftp://example.com/cat.png"}, "image", "image_source"),
        ({"image": "cat.png"}, "image", "image_source"),
        ({"image": "data:image/png,abc"}, "image", "data_url"),
        ({"image": "data:image/png;base64,a*b="}, "image", "base64"),
        ({"image": data_url(b"not a picture")}, "image", "image_decodable"),
        ({"image": data_url(png()[:-30])}, "image", "image_decodable"),
        ({"image": data_url(png(8_000, 4_000, mode="1"))}, "image", "image_pixels"),
        ({"image": data_url(png())}, "image", "forbidden"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
async def test_a_broken_rule_is_named_with_its_field(
    http: httpx.AsyncClient, fields: dict[str, object], field: str, rule: str
) -> None:
    reply = await http.post("/tasks", json={"prompt": PROMPT, **fields})
    problem = assert_problem(reply, 422, "VALIDATION_FAILED", **{field: rule})
    assert field in str(problem["detail"])


async def test_all_broken_rules_are_named_at_once(http: httpx.AsyncClient) -> None:
    broken = {"width": 33, "num_frames": 2, "deadline_seconds": 9_999, "callback_url": "http://10.0.0.1/"}
    reply = await http.post("/tasks", json={"prompt": PROMPT, **broken})
    expected = {"width": "multiple_of", "num_frames": "frame_count", "deadline_seconds": "maximum"}
    assert_problem(reply, 422, "VALIDATION_FAILED", **expected, callback_url="address")


async def test_unknown_model_is_refused_with_the_models_there_are(http: httpx.AsyncClient) -> None:
    reply = await http.post("/tasks", json={"prompt": PROMPT, "model": "sora"})
    problem = assert_problem(reply, 422, "UNKNOWN_MODEL", model="known_model")
    assert "moving-shapes" in str(problem["detail"])


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b'{"prompt": }',
        b"\xff\xfe{",
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5_000 + b"}",
        b'{"prompt": "\xe9"}',
    ],
    ids=["open", "empty", "no value", "not utf-8", "deep", "huge number", "latin-1"],
)
async def test_what_is_not_json_is_400(http: httpx.AsyncClient, body: bytes) -> None:
    reply = await http.post("/tasks", content=body, headers={"Content-Type": "application/json"})
    if body:
        assert_problem(reply, 400, "MALFORMED_JSON")
    else:
        assert_problem(reply, 422, "VALIDATION_FAILED", body="missing")


async def test_nan_is_no_number(http: httpx.AsyncClient) -> None:
    body = b'{"prompt": "x", "guidance_scale": NaN, "fps": Infinity}'
    reply = await http.post("/tasks", content=body, headers={"Content-Type": "application/json"})
    assert_problem(reply, 422, "VALIDATION_FAILED", guidance_scale="finite_number", fps="finite_number")


async def test_lone_surrogates_are_refused_cleanly(http: httpx.AsyncClient) -> None:
    for body in (rb'{"prompt": "\ud800"}', rb'{"prompt": "x", "labels": ["\udfff"]}', rb'{"prompt": "x", "\ud800": 1}'):
        reply = await http.post("/tasks", content=body, headers={"Content-Type": "application/json"})
        assert_problem(reply, 422, "VALIDATION_FAILED")


async def test_a_body_of_another_type_is_415(http: httpx.AsyncClient) -> None:
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        reply = await http.post("/tasks", content=b'{"prompt": "x"}', headers={"Content-Type": media_type})
        assert_problem(reply, 415, "UNSUPPORTED_MEDIA_TYPE")


async def test_a_json_body_that_is_no_object_is_422(http: httpx.AsyncClient) -> None:
    bodies: list[object] = [[], "x", 1, None]
    for body in bodies:
        assert_problem(await http.post("/tasks", json=body), 422, "VALIDATION_FAILED")


async def test_problems_repeat_nothing_of_the_prompt(http: httpx.AsyncClient) -> None:
    reply = await http.post("/tasks", json={"prompt": "my secret wish\0", "width": "my secret width"})
    assert_problem(reply, 422, "VALIDATION_FAILED")
    assert "secret" not in reply.text


async def test_an_oversize_body_is_413_with_or_without_its_length(stand: Stand, http: httpx.AsyncClient) -> None:
    body = b'{"prompt": "' + b"x" * stand.settings.max_request_bytes + b'"}'
    assert_problem(
        await http.post("/tasks", content=body, headers={"Content-Type": "application/json"}), 413, "BODY_TOO_LARGE"
    )

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1 << 20):
            yield body[start : start + (1 << 20)]

    chunked = await http.post("/tasks", content=pieces(), headers={"Content-Type": "application/json"})
    assert_problem(chunked, 413, "BODY_TOO_LARGE")


async def test_an_image_over_the_byte_limit_is_refused(stand: Stand, http: httpx.AsyncClient) -> None:
    image = data_url(b"\0" * (stand.settings.max_image_bytes + 1))
    reply = await http.post("/tasks", json={"prompt": PROMPT, "image": image})
    assert_problem(reply, 422, "VALIDATION_FAILED", image="image_bytes")


@pytest.mark.parametrize("key", ["", "x" * 256, "caf\xe9", "tab\there"])
async def test_illegal_idempotency_keys_are_refused(http: httpx.AsyncClient, key: str) -> None:
    headers = [(b"Idempotency-Key", key.encode("latin-1"))]
    reply = await http.post("/tasks", json={"prompt": PROMPT}, headers=headers)
    assert_problem(reply, 422, "VALIDATION_FAILED", **{"Idempotency-Key": "idempotency_key"})


async def test_routes_and_methods_that_do_not_exist(http: httpx.AsyncClient) -> None:
    assert_problem(await http.get("/nothing"), 404, "NOT_FOUND")
    reply = await http.put("/tasks", json={})
    assert_problem(reply, 405, "METHOD_NOT_ALLOWED")
    assert set(reply.headers["allow"].split(", ")) >= {"GET", "POST"}


async def test_a_path_with_a_slash_too_many_is_404_and_leads_nowhere(http: httpx.AsyncClient) -> None:
    for method, path in (("POST", "/tasks/"), ("GET", "/models/"), ("GET", "/tasks/x/video/")):
        reply = await http.request(method, path, json={}, headers={"Host": "evil.test"})
        assert_problem(reply, 404, "NOT_FOUND")
        assert "location" not in reply.headers


async def test_every_task_route_is_404_for_a_stranger(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    task_id = (await waiting.post("/tasks", json={"prompt": PROMPT})).json()["task_id"]
    schema = (await waiting.get(f"{quiet.url}/openapi.json")).json()
    routes = [
        (method.upper(), path)
        for path, operations in schema["paths"].items()
        for method in operations
        if "{task_id}" in path
    ]
    tails = {(method, path.rpartition("{task_id}")[2]) for method, path in routes}
    assert {
        *(("GET", tail) for tail in ("", "/video", "/poster", "/events", "/timeline", "/callback")),
        *(("POST", tail) for tail in ("/cancel", "/retry", "/callback/redeliver")),
        ("DELETE", ""),
    } <= tails
    # The schema leaves these two out: they are their GET without a body.
    routes += [("HEAD", f"/api/v1/tasks/{{task_id}}/{kind}") for kind in ("video", "poster")]
    absent = ("t" + "a" * 26, "nonsense", f"callback-{task_id}")
    async with quiet.user() as stranger:
        for method, path in routes:
            for client, name in ((stranger, task_id), *((waiting, name) for name in absent)):
                reply = await client.request(method, quiet.url + path.replace("{task_id}", name))
                if method == "HEAD":
                    assert reply.status_code == 404
                else:
                    assert_problem(reply, 404, "TASK_NOT_FOUND")
    assert (await waiting.get(f"/tasks/{task_id}")).json()["status"] == "QUEUED"


async def test_a_service_key_names_its_end_user(stand: Stand) -> None:
    async with http_client(headers={"Authorization": f"Bearer {stand.service_key}"}) as nameless:
        reply = await nameless.get(f"{stand.url}/api/v1/tasks/{'t' + 'a' * 26}")
        assert_problem(reply, 422, "VALIDATION_FAILED", **{"X-User-Id": "missing"})


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Basic abc", "Bearer rg_k1k1k1_" + "x" * 43])
async def test_without_a_known_key_nothing_answers(stand: Stand, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with http_client(f"{stand.url}/api/v1", headers) as nobody:
        for method, path in (
            ("POST", "/tasks"),
            ("GET", "/tasks"),
            ("GET", "/tasks/x"),
            ("POST", "/tasks/x/cancel"),
            ("GET", "/tasks/x/video"),
            ("GET", "/models"),
            ("DELETE", "/tasks/x"),
            ("POST", "/tasks/x/retry"),
            ("GET", "/tasks/x/timeline"),
            ("GET", "/tasks/x/callback"),
            ("POST", "/callbacks/redeliver"),
            ("POST", "/callbacks/test"),
        ):
            reply = await nobody.request(method, path, content=b"{")
            assert_problem(reply, 401, "UNAUTHENTICATED")
            assert reply.headers["www-authenticate"].startswith("Bearer")


async def test_a_user_key_acts_for_itself_and_names_no_end_user(stand: Stand) -> None:
    headers = {"Authorization": f"Bearer {stand.keys['user']}"}
    async with http_client(f"{stand.url}/api/v1", headers) as user:
        task = (await user.post("/tasks", json={"prompt": PROMPT})).json()
        assert (await user.get(f"/tasks/{task['task_id']}")).status_code == 200
        reply = await user.get(f"/tasks/{task['task_id']}", headers={"X-User-Id": "bob"})
        assert_problem(reply, 403, "FORBIDDEN")


@pytest.mark.parametrize("user_id", ["", "x" * 65, "é" * 33])
async def test_illegal_user_ids_are_refused(stand: Stand, user_id: str) -> None:
    headers = [
        (b"Authorization", f"Bearer {stand.service_key}".encode()),
        (b"X-User-Id", user_id.encode("utf-8")),
    ]
    async with http_client(f"{stand.url}/api/v1", headers) as http:
        reply = await http.post("/tasks", json={"prompt": PROMPT})
        assert_problem(reply, 422, "VALIDATION_FAILED", **{"X-User-Id": "length"})


async def test_the_tier_caps_the_priority(stand: Stand) -> None:
    headers = {"Authorization": f"Bearer {stand.keys['free']}"}
    async with http_client(f"{stand.url}/api/v1", headers) as http:
        for priority in ("normal", "high"):
            reply = await http.post("/tasks", json={"prompt": PROMPT, "priority": priority})
            assert_problem(reply, 403, "PRIORITY_NOT_ALLOWED")
        assert (await http.post("/tasks", json={"prompt": PROMPT})).json()["priority"] == "low"


async def test_a_revoked_key_stops_working_within_seconds(stand: Stand) -> None:
    token = stand.keys["revoked"]
    headers = {"Authorization": f"Bearer {token}"}
    async with http_client(f"{stand.url}/api/v1", headers) as http:
        assert (await http.get("/models")).status_code == 200
        revoke_key(stand.settings.keys_file, token.split("_")[1])
        await stand.keys_reloaded()
        assert_problem(await http.get("/models"), 401, "UNAUTHENTICATED")


async def test_responses_carry_security_headers_and_the_request_id(http: httpx.AsyncClient) -> None:
    reply = await http.get("/models", headers={"X-Request-Id": "trace-1"})
    assert reply.headers["x-request-id"] == "trace-1"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert reply.headers["cache-control"] == "no-store"
    forged = await http.get("/models", headers={"X-Request-Id": "a b\tc"})
    assert forged.headers["x-request-id"] not in ("a b\tc", "")


async def test_the_access_log_has_no_prompt_key_or_signature(stand: Stand, http: httpx.AsyncClient) -> None:
    with capture_logs() as lines:
        await http.post("/tasks", json={"prompt": "a secret wish"})
        await http.get("/tasks/x/video?exp=1&sig=secret-signature")
    written = [line for line in lines if line["event"] == "request"]
    assert [(line["method"], line["status"]) for line in written] == [("POST", 202), ("GET", 404)]
    assert written[0]["key_id"] == stand.service_key.split("_")[1]
    assert "secret" not in str(lines)
    assert stand.service_key not in str(lines)


async def test_what_goes_wrong_here_is_500_without_its_cause(quiet: Stand, waiting: httpx.AsyncClient) -> None:
    task_id = "t" + "b" * 26
    unreadable = Payload(metadata={"encoding": b"binary/encrypted", "encryption-key-id": b"lost"}, data=b"x" * 40)
    await quiet.client.workflow_service.start_workflow_execution(
        StartWorkflowExecutionRequest(
            namespace=quiet.client.namespace,
            workflow_id=task_id,
            workflow_type=WorkflowType(name="GenerationWorkflow"),
            task_queue=TaskQueue(name="nobody"),
            request_id=task_id,
            memo=Memo(fields={naming.MEMO_REQUEST: unreadable}),
        )
    )
    reply = await waiting.get(f"/tasks/{task_id}", headers={"X-Request-Id": "trace-7"})
    problem = assert_problem(reply, 500, "INTERNAL")
    assert "trace-7" in str(problem["detail"])
    assert "lost" not in reply.text
    assert reply.headers["x-content-type-options"] == "nosniff"
