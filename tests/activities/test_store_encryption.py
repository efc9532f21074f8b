"""Encryption at rest by the store: the setting is asked for with every upload."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from activities.storage import ObjectStore

SSE = "x-amz-server-side-encryption"


@contextmanager
def recording() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """An endpoint that takes every upload and keeps its headers."""
    seen: list[dict[str, str]] = []

    class Endpoint(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            seen.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(200)
            self.send_header("etag", '"1"')
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", seen
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ({}, {SSE: None}),
        ({"sse": "AES256"}, {SSE: "AES256"}),
        (
            {"sse": "aws:kms", "sse_kms_key_id": "key-1"},
            {SSE: "aws:kms", f"{SSE}-aws-kms-key-id": "key-1"},
        ),
    ],
)
async def test_an_upload_asks_for_the_encryption_that_is_set(
    options: dict[str, str], headers: dict[str, str | None]
) -> None:
    with recording() as (endpoint, seen):
        access = {"endpoint": endpoint, "allow_http": "true", "access_key_id": "id", "secret_access_key": "secret"}
        store = ObjectStore.from_url("s3://bucket/prefix", options={**access, **options})
        await store.put("a/b", b"1", content_type="text/plain")
    (request,) = seen
    assert {name: request.get(name) for name in headers} == headers


def test_a_key_without_kms_is_refused() -> None:
    with pytest.raises(ValueError, match="sse_kms_key_id"):
        ObjectStore.from_url("s3://bucket", options={"sse": "AES256", "sse_kms_key_id": "key-1"})
