"""One contract for every kind of store, then what only one kind has."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import obstore
import pytest

from activities.storage import (
    RANGE_BYTES,
    InvalidKeyError,
    ObjectNotFoundError,
    ObjectStore,
    StoreUnavailableError,
)
from activities.store_urls import TimeLimits, open_store
from activities.uploads import PART_BYTES
from tests.object_stores import ACCESS_KEY_ID, BUCKET, SECRET_ACCESS_KEY, S3Endpoint, relay_to, serving_s3

SHORT = TimeLimits(
    connect=timedelta(seconds=1),
    request=timedelta(seconds=1),
    retry_window=timedelta(seconds=1),
    call=timedelta(seconds=1.5),
)


@dataclass
class Root:
    """A store and the files behind it."""

    store: ObjectStore
    folder: Path

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    if request.param == "local":
        folder = tmp_path / "a store"
        return Root(ObjectStore.from_url(folder.as_uri()), folder)
    endpoint: S3Endpoint = request.getfixturevalue("s3_endpoint")
    url = endpoint.new_root()
    return Root(ObjectStore.from_url(url, options=endpoint.options()), endpoint.path_of(url, ""))


@pytest.fixture
def store(root: Root) -> ObjectStore:
    return root.store


LARGE = os.urandom(2 * PART_BYTES + 12_345)
"""Several parts, its end no part's end."""


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large.mp4"
    path.write_bytes(LARGE)
    return path


def same(got: bytes, expected: bytes) -> bool:
    """Compare without the minutes that a report of a difference between megabytes takes."""
    return got == expected


async def keys(store: ObjectStore, prefix: str, after: str | None = None) -> list[str]:
    return [info.key async for info in store.list(prefix, after=after)]


async def read(store: ObjectStore, key: str, start: int, end: int) -> bytes:
    return b"".join([piece async for piece in store.read_range(key, start, end)])


class TestPutAndGet:
    async def test_bytes_come_back_with_size_time_and_etag(self, store: ObjectStore) -> None:
        before = datetime.now(UTC) - timedelta(seconds=2)
        await store.put("artifacts/k/t/manifest.json", b"{}", content_type="application/json")
        info = await store.head("artifacts/k/t/manifest.json")
        assert await store.get("artifacts/k/t/manifest.json") == b"{}"
        assert info is not None
        assert (info.key, info.size) == ("artifacts/k/t/manifest.json", 2)
        assert info.last_modified.tzinfo is UTC
        assert before <= info.last_modified <= datetime.now(UTC) + timedelta(seconds=1)
        assert info.etag

    @pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
    async def test_a_file_of_any_size_comes_back(self, store: ObjectStore, tmp_path: Path, size: int) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom(size))
        await store.put("a/file", path, content_type="video/mp4")
        assert same(await read(store, "a/file", 0, size), path.read_bytes())

    async def test_large_bytes_come_back(self, store: ObjectStore) -> None:
        await store.put("a/file", LARGE, content_type="video/mp4")
        assert same(await read(store, "a/file", 0, len(LARGE)), LARGE)

    async def test_a_put_replaces_what_was_there(self, store: ObjectStore) -> None:
        await store.put("a/b", b"first, and longer", content_type="text/plain")
        await store.put("a/b", b"second", content_type="text/plain")
        assert await store.get("a/b") == b"second"

    async def test_missing_objects_are_told_apart_from_a_missing_store(self, store: ObjectStore) -> None:
        assert await store.head("no/such") is None
        for call in (store.get("no/such"), read(store, "no/such", 0, 1)):
            with pytest.raises(ObjectNotFoundError) as caught:
                await call
            assert "no/such" in str(caught.value)
            assert store.name in str(caught.value)

    async def test_a_folder_is_not_an_object(self, store: ObjectStore) -> None:
        await store.put("a/b/c", b"1", content_type="text/plain")
        assert await store.head("a/b") is None

    async def test_a_file_that_is_not_there_is_not_put(self, store: ObjectStore, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            await store.put("a/b", tmp_path / "none", content_type="video/mp4")
        assert await store.head("a/b") is None

    @pytest.mark.parametrize("wait", [0.0, 0.002, 0.01, 0.03])
    async def test_a_cancelled_put_leaves_all_or_nothing_and_no_parts(
        self, root: Root, large: Path, wait: float
    ) -> None:
        put = asyncio.create_task(root.store.put("a/large", large, content_type="video/mp4"))
        await asyncio.sleep(wait)
        put.cancel()
        await asyncio.wait({put})
        assert put.cancelled() or put.exception() is None  # The last one may be done by now.
        after_cancel = root.files()
        await asyncio.sleep(0.2)
        assert root.files() == after_cancel
        assert after_cancel in ([], ["a/large"])
        if after_cancel:
            assert same(await read(root.store, "a/large", 0, 1 << 30), LARGE)

    @pytest.mark.parametrize(
        "key",
        [
            "",
            "/a",
            "a/",
            "a//b",
            "..",
            "../a",
            "a/../b",
            "a/./b",
            ".a",
            "a/.b",
            "a\\b",
            "a b",
            "a#1",
            "ä",
            "a\n",
            "a" * 901,
        ],
    )
    async def test_keys_that_could_leave_the_root_or_vanish_are_refused_everywhere(
        self, store: ObjectStore, key: str
    ) -> None:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.put(key, b"", content_type="text/plain"),
            lambda: store.get(key),
            lambda: store.head(key),
            lambda: read(store, key, 0, 1),
            lambda: keys(store, key),
            lambda: store.delete(["a", key]),
            lambda: store.signed_url(key, expires_in=timedelta(minutes=1)),
        ]
        for call in calls:
            with pytest.raises(InvalidKeyError):
                await call()


class TestReadRange:
    @pytest.mark.parametrize(
        ("start", "end"),
        [
            (0, 1),
            (5, 9),
            (0, RANGE_BYTES),
            (RANGE_BYTES - 1, RANGE_BYTES + 1),
            (3, 2 * RANGE_BYTES),
            (7, 7),
            (2 * PART_BYTES, 1 << 40),
            (1 << 40, 1 << 41),
        ],
    )
    async def test_any_range_is_exact_and_ends_with_the_object(
        self, store: ObjectStore, large: Path, start: int, end: int
    ) -> None:
        await store.put("a/large", large, content_type="video/mp4")
        assert same(await read(store, "a/large", start, end), LARGE[start:end])

    async def test_the_whole_of_a_small_object(self, store: ObjectStore) -> None:
        await store.put("a/b", b"0123456789", content_type="text/plain")
        assert await read(store, "a/b", 0, 10) == b"0123456789"
        assert await read(store, "a/b", 0, 11) == b"0123456789"

    async def test_pieces_are_bounded(self, store: ObjectStore, large: Path) -> None:
        await store.put("a/large", large, content_type="video/mp4")
        pieces = [len(piece) async for piece in store.read_range("a/large", 0, 1 << 40)]
        assert max(pieces) <= 2 * RANGE_BYTES
        assert len(pieces) > 1

    @pytest.mark.parametrize(("start", "end"), [(-1, 3), (4, 3)])
    async def test_a_range_that_is_none_is_refused(self, store: ObjectStore, start: int, end: int) -> None:
        await store.put("a/b", b"0123456789", content_type="text/plain")
        with pytest.raises(ValueError, match="range"):
            await read(store, "a/b", start, end)


class TestList:
    async def test_keys_come_in_order_by_whole_segments(self, store: ObjectStore) -> None:
        for key in ("z/1", "a/b/2", "a/a", "a/b.c", "a/b/1", "a/bc/1", "a/b-c"):
            await store.put(key, b"12", content_type="text/plain")
        assert await keys(store, "a") == ["a/a", "a/b-c", "a/b.c", "a/b/1", "a/b/2", "a/bc/1"]
        assert await keys(store, "a/b") == ["a/b/1", "a/b/2"]
        assert await keys(store, "none") == []
        assert [info.size async for info in store.list("z")] == [2]

    async def test_after_leaves_out_what_was_seen(self, store: ObjectStore) -> None:
        for key in ("a/1", "a/2", "a/3"):
            await store.put(key, b"", content_type="text/plain")
        assert await keys(store, "a", after="a/2") == ["a/3"]
        assert await keys(store, "a", after="a/20") == ["a/3"]
        assert await keys(store, "a", after="a/3") == []

    async def test_more_than_a_page(self, store: ObjectStore) -> None:
        names = [f"many/{number:04}" for number in range(1_030)]
        for first in range(0, len(names), 50):
            await asyncio.gather(*(store.put(key, b"", content_type="text/plain") for key in names[first : first + 50]))
        assert await keys(store, "many") == names
        assert await store.delete(names) == len(names)
        assert await keys(store, "many") == []

    @pytest.mark.parametrize("foreign", ["a/.DS_Store", "a/with space"])
    async def test_objects_that_no_put_made_are_left_out(self, root: Root, foreign: str) -> None:
        await root.store.put("a/b", b"1", content_type="text/plain")
        await obstore.put_async(root.store._store, foreign, b"x")
        assert await keys(root.store, "a") == ["a/b"]


class TestDelete:
    async def test_missing_keys_are_fine_and_the_rest_goes(self, root: Root) -> None:
        for key in ("a/1", "a/2", "b/1"):
            await root.store.put(key, b"1", content_type="text/plain")
        assert await root.store.delete(["a/none", "a/1", "none/at/all", "a/2"]) == 4
        assert root.files() == ["b/1"]

    async def test_nothing_to_delete(self, store: ObjectStore) -> None:
        assert await store.delete([]) == 0

    async def test_no_empty_folders_pile_up(self, root: Root) -> None:
        await root.store.put("artifacts/k/t/video.mp4", b"1", content_type="video/mp4")
        await root.store.delete(["artifacts/k/t/video.mp4"])
        assert not (root.folder / "artifacts").exists()


class TestLocalFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path / "store"

    @pytest.fixture
    def local(self, folder: Path) -> ObjectStore:
        return ObjectStore.from_url(folder.as_uri())

    async def test_signs_no_urls(self, local: ObjectStore) -> None:
        await local.put("a/b", b"1", content_type="text/plain")
        assert await local.signed_url("a/b", expires_in=timedelta(minutes=1)) is None

    async def test_a_disk_that_takes_no_more_leaves_no_part(
        self, local: ObjectStore, folder: Path, large: Path
    ) -> None:
        with file_size_limit(PART_BYTES), pytest.raises(StoreUnavailableError):
            await local.put("a/large", large, content_type="video/mp4")
        assert Root(local, folder).files() == []

    async def test_an_object_in_the_place_of_a_folder_is_a_store_error(self, local: ObjectStore) -> None:
        await local.put("a", b"1", content_type="text/plain")
        with pytest.raises(StoreUnavailableError, match="a/b"):
            await local.put("a/b", b"1", content_type="text/plain")

    async def test_a_reader_never_sees_a_part_of_an_object(self, local: ObjectStore, tmp_path: Path) -> None:
        bodies = [bytes([number]) * (2 * PART_BYTES) for number in range(3)]
        await local.put("a/b", bodies[0], content_type="video/mp4")

        async def replace() -> None:
            for _ in range(4):
                for body in bodies:
                    await local.put("a/b", body, content_type="video/mp4")

        replacing = asyncio.create_task(replace())
        seen = 0
        while not replacing.done():
            assert await local.get("a/b") in bodies
            seen += 1
        await replacing
        assert seen > 1

    async def test_an_object_removed_while_it_is_read_is_an_error(self, local: ObjectStore, large: Path) -> None:
        await local.put("a/large", large, content_type="video/mp4")
        pieces = local.read_range("a/large", 0, 1 << 40)
        await anext(pieces)
        await local.delete(["a/large"])
        with pytest.raises(ObjectNotFoundError):
            await anext(pieces)

    async def test_parts_of_a_killed_process_are_removed_when_old(self, local: ObjectStore, folder: Path) -> None:
        await local.put("a/b", b"1", content_type="text/plain")
        old, young = folder / "a" / "b#1", folder / "a" / "c#2"
        for path in (old, young):
            path.write_bytes(b"part")
        os.utime(old, (time.time() - 7_200,) * 2)
        assert await keys(local, "a") == ["a/b"]
        assert await local.remove_leftovers(datetime.now(UTC) - timedelta(hours=1)) == 1
        assert Root(local, folder).files() == ["a/b", "a/c#2"]

    async def test_a_folder_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(StoreUnavailableError, match="file/store"):
            ObjectStore.from_url((tmp_path / "file" / "store").as_uri())


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestS3:
    @pytest.fixture
    def url(self, s3_endpoint: S3Endpoint) -> str:
        return s3_endpoint.new_root()

    async def test_a_signed_url_serves_the_object_with_its_type_and_ranges(
        self, s3_endpoint: S3Endpoint, url: str
    ) -> None:
        store = ObjectStore.from_url(url, options=s3_endpoint.options())
        await store.put("a/clip.mp4", b"0123456789", content_type="video/mp4")
        signed = await store.signed_url("a/clip.mp4", expires_in=timedelta(minutes=15))
        assert signed is not None
        assert SECRET_ACCESS_KEY not in signed
        assert "X-Amz-Expires=900" in signed
        async with httpx.AsyncClient() as client:
            whole = await client.get(signed)
            part = await client.get(signed, headers={"range": "bytes=2-4"})
            unsigned = await client.get(signed.partition("?")[0])
            forged = await client.get(signed.replace("clip.mp4", "other.mp4"))
        assert (whole.status_code, whole.content) == (200, b"0123456789")
        assert whole.headers["content-type"] == "video/mp4"
        assert part.content == b"234"
        assert part.headers["content-range"] == "bytes 2-4/10"
        assert unsigned.is_client_error
        assert forged.status_code == 403

    async def test_signed_urls_point_to_the_public_endpoint(self, s3_endpoint: S3Endpoint, url: str) -> None:
        async with relay_to(s3_endpoint.url) as public:
            store = ObjectStore.from_url(url, options=s3_endpoint.options(public_endpoint=public.url))
            await store.put("a/clip.mp4", b"0123456789", content_type="video/mp4")
            signed = await store.signed_url("a/clip.mp4", expires_in=timedelta(minutes=15))
            assert signed is not None
            assert signed.startswith(f"{public.url}/{BUCKET}/")
            async with httpx.AsyncClient() as client:
                assert (await client.get(signed)).content == b"0123456789"

    @pytest.mark.parametrize("sse", [{}, {"sse": "AES256"}, {"sse": "aws:kms", "sse_kms_key_id": "a-key"}])
    async def test_encryption_at_rest_is_asked_for_with_every_put(
        self, s3_endpoint: S3Endpoint, url: str, large: Path, sse: dict[str, str]
    ) -> None:
        async with relay_to(s3_endpoint.url) as relay:
            store = ObjectStore.from_url(url, options=s3_endpoint.options(endpoint=relay.url, **sse))
            await store.put("a/small", b"1", content_type="text/plain")
            await store.put("a/large", large, content_type="video/mp4")
            starts = [
                request
                for request in relay.requests()
                if (request.method == "PUT" and "a/small" in request.target)
                or (request.method == "POST" and "?uploads" in request.target)
            ]
        assert len(starts) == 2
        for request in starts:
            assert request.headers.get("x-amz-server-side-encryption") == sse.get("sse")
            assert request.headers.get("x-amz-server-side-encryption-aws-kms-key-id") == sse.get("sse_kms_key_id")

    async def test_a_large_file_goes_in_bounded_parts(self, s3_endpoint: S3Endpoint, url: str, large: Path) -> None:
        async with relay_to(s3_endpoint.url) as relay:
            store = ObjectStore.from_url(url, options=s3_endpoint.options(endpoint=relay.url))
            await store.put("a/large", large, content_type="video/mp4")
            sizes = [int(request.headers["content-length"]) for request in relay.requests() if request.method == "PUT"]
        assert len(sizes) == 3
        assert max(sizes) <= PART_BYTES

    async def test_a_cancelled_upload_is_aborted_at_the_endpoint(
        self, s3_endpoint: S3Endpoint, url: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "huge"
        path.write_bytes(bytes(20 * PART_BYTES))
        async with relay_to(s3_endpoint.url) as relay:
            store = ObjectStore.from_url(url, options=s3_endpoint.options(endpoint=relay.url))
            put = asyncio.create_task(store.put("a/huge", path, content_type="video/mp4"))
            while not any("partNumber" in request.target for request in relay.requests()):
                await asyncio.sleep(0.002)
            put.cancel()
            with pytest.raises(asyncio.CancelledError):
                await put
            methods = [request.method for request in relay.requests() if "uploadId" in request.target]
        assert methods.count("DELETE") == 1
        assert "POST" not in methods  # which would complete it
        assert await ObjectStore.from_url(url, options=s3_endpoint.options()).head("a/huge") is None

    async def test_wrong_credentials_are_a_store_error_that_shows_none(self, s3_endpoint: S3Endpoint, url: str) -> None:
        wrong = s3_endpoint.options(secret_access_key="some-other-secret")
        store = ObjectStore.from_url(url, options=wrong)
        for call in all_calls(store):
            with pytest.raises(StoreUnavailableError, match="403") as caught:
                await call
            shown = repr(caught.value) + repr(caught.value.__cause__)
            assert "some-other-secret" not in shown
            assert ACCESS_KEY_ID not in shown
            assert caught.value.__suppress_context__

    async def test_a_missing_bucket_is_a_store_error(self, s3_endpoint: S3Endpoint) -> None:
        store = ObjectStore.from_url("s3://no-such-bucket/x", options=s3_endpoint.options())
        for call in (store.put("a/b", b"1", content_type="text/plain"), store.get("a/b"), keys(store, "a")):
            with pytest.raises(StoreUnavailableError, match="bucket"):
                await call

    async def test_a_killed_endpoint_fails_every_call_in_bounded_time_and_is_used_again_when_back(
        self, tmp_path: Path
    ) -> None:
        with serving_s3(tmp_path) as endpoint:
            store = ObjectStore.from_url(f"s3://{BUCKET}/x", options=endpoint.options())
            await store.put("a/b", b"1", content_type="text/plain")
            endpoint.kill()
            began = time.monotonic()
            for call in all_calls(store):
                with pytest.raises(StoreUnavailableError, match="a"):
                    await call
                assert time.monotonic() - began < 10
                began = time.monotonic()
            with serving_s3(tmp_path, port=int(endpoint.url.rpartition(":")[2])):
                assert await store.get("a/b") == b"1"

    async def test_an_endpoint_that_says_nothing_fails_every_call_in_bounded_time(
        self, s3_endpoint: S3Endpoint, url: str, large: Path
    ) -> None:
        async with relay_to(s3_endpoint.url) as relay:
            relay.stall()
            store = ObjectStore.from_url(url, options=s3_endpoint.options(endpoint=relay.url), limits=SHORT)
            calls = [*all_calls(store), store.put("a/large", large, content_type="video/mp4")]
            began = time.monotonic()
            results = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - began < 6
        assert [type(result) for result in results] == [StoreUnavailableError] * len(results)

    async def test_a_call_is_bounded_whatever_its_requests_may_take(self, s3_endpoint: S3Endpoint, url: str) -> None:
        async with relay_to(s3_endpoint.url) as relay:
            relay.stall()
            limits = replace(SHORT, request=timedelta(seconds=60), call=timedelta(seconds=0.5))
            store = ObjectStore.from_url(url, options=s3_endpoint.options(endpoint=relay.url), limits=limits)
            began = time.monotonic()
            results = await asyncio.gather(*all_calls(store, put=False), return_exceptions=True)
        assert time.monotonic() - began < 3
        assert [type(result) for result in results] == [StoreUnavailableError] * 5

    async def test_an_endpoint_killed_during_an_upload_fails_it_and_shows_no_object(
        self, tmp_path: Path, large: Path
    ) -> None:
        with serving_s3(tmp_path) as endpoint:
            store = ObjectStore.from_url(f"s3://{BUCKET}/x", options=endpoint.options(), limits=SHORT)
            put = asyncio.create_task(store.put("a/large", large, content_type="video/mp4"))
            await asyncio.sleep(0.05)
            endpoint.kill()
            with pytest.raises(StoreUnavailableError):
                await put
            with serving_s3(tmp_path, port=int(endpoint.url.rpartition(":")[2])):
                assert await store.head("a/large") is None


def all_calls(store: ObjectStore, *, put: bool = True) -> Iterator[Awaitable[object]]:
    if put:
        yield store.put("a/b", b"1", content_type="text/plain")
    yield store.get("a/b")
    yield store.head("a/b")
    yield read(store, "a/b", 0, 1)
    yield keys(store, "a")
    yield store.delete(["a/b"])


class TestUrls:
    @pytest.mark.parametrize(
        ("url", "options", "named"),
        [
            ("", {}, "scheme"),
            ("/folder", {}, "scheme"),
            ("ftp://host/folder", {}, "ftp"),
            ("memory:///", {}, "memory"),
            ("file://host/folder", {}, "file:///"),
            ("file:///folder", {"endpoint": "x"}, "endpoint"),
            ("s3://", {}, "bucket"),
            ("s3://user:password@bucket", {}, "credentials"),
            ("s3://bucket?x=y", {}, "query"),
            ("s3://bucket", {"sse": "rot13"}, "sse"),
            ("s3://bucket", {"sse_kms_key_id": "k"}, "sse_kms_key_id"),
            ("s3://bucket", {"sse": "AES256", "sse_kms_key_id": "k"}, "sse_kms_key_id"),
            ("s3://bucket", {"path_style": "perhaps"}, "path_style"),
            ("s3://bucket", {"endpoint": "http://host"}, "allow_http"),
            ("s3://bucket", {"endpoint": "host:9000"}, "endpoint"),
            ("s3://bucket", {"access_key_id": "a"}, "secret_access_key"),
            ("s3://bucket", {"secret": "hidden-value"}, "secret"),
            ("az://container", {}, "az://container"),
            ("gs://bucket", {"nonsense": "hidden-value"}, "gs://bucket"),
        ],
    )
    def test_a_wrong_url_or_option_is_named_and_its_value_kept_back(
        self, url: str, options: dict[str, str], named: str
    ) -> None:
        with pytest.raises(ValueError, match=named) as caught:
            ObjectStore.from_url(url, options=options)
        assert "hidden-value" not in str(caught.value)
        assert "password@" not in str(caught.value)

    async def test_azure_options_reach_obstore(self) -> None:
        account = {"account_name": "account", "account_key": "c2VjcmV0LWtleQ=="}
        store = ObjectStore.from_url("az://container/prefix", options=account)
        signed = await store.signed_url("a/b", expires_in=timedelta(minutes=1))
        assert signed is not None
        assert signed.startswith("https://account.blob.core.windows.net/container/prefix/a/b?")

    def test_google_urls_open_without_a_request(self) -> None:
        assert open_store("gs://bucket/prefix", {"skip_signature": "true"}).name == "gs://bucket/prefix"

    async def test_virtual_hosts_are_an_option(self) -> None:
        options = {"access_key_id": "abc", "secret_access_key": "def", "path_style": "false"}
        store = ObjectStore.from_url("s3://bucket/prefix", options=options)
        signed = await store.signed_url("a/b", expires_in=timedelta(minutes=1))
        assert signed is not None
        assert signed.startswith("https://bucket.s3.us-east-1.amazonaws.com/prefix/a/b?")
