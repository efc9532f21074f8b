"""Object storage for clips, posters, manifests and input images: a local folder, S3, or what else obstore reaches.

Rules kept here, for every store alike:

- A key names a whole object or nothing; a put that fails leaves no part of one, and a cancelled put is settled before
  the cancellation goes on, so that nothing appears after its caller has cleaned up.
- Every call ends in bounded time, also when the endpoint is gone or accepts connections and then says nothing.
- No file is ever in memory whole; only `get` is, and it is for small objects.
- Errors name the key and the store, never a credential. The text of the underlying error is left out, because
  endpoints echo parts of the signed request in it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import obstore
from obstore import exceptions as obstore_errors
from obstore.store import S3Store

from activities.store_urls import DEFAULT_TIME_LIMITS, OpenedStore, TimeLimits, open_store
from activities.uploads import PART_BYTES, UploadSource

if TYPE_CHECKING:
    from obstore import ObjectMeta

PARALLEL_PARTS: Final = 4
RANGE_BYTES: Final = 4 * 1024 * 1024
"""Piece of a ranged read: a slow reader holds this much memory and no connection."""
LIST_PAGE: Final = 500
DELETE_BATCH: Final = 1_000
PARALLEL_DELETES: Final = 8

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_MAX_KEY_LENGTH = 900  # S3 allows 1,024 bytes, root prefix included.
_STATUS = re.compile(r"status code: (\d{3})")
_S3_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_LEFTOVER = re.compile(r".+#\d+")  # Where obstore writes until it renames; no legal key looks like it.

T = TypeVar("T")


class ObjectNotFoundError(LookupError):
    """There is no object under the key."""


class StoreUnavailableError(Exception):
    """The store did not do what it was asked; trying again later may work."""


class _RangeNotHonouredError(Exception):
    """The endpoint answered 200 to a ranged request, as some S3-compatible ones do; obstore takes 206 only."""


class InvalidKeyError(ValueError):
    """A key that could leave the root of the store, or that stores spell differently."""


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """What a store says about an object."""

    key: str
    size: int
    """Bytes."""
    last_modified: datetime
    """Aware UTC."""
    etag: str | None


def check_key(key: str) -> str:
    """Return the key if it is legal: segments of ASCII letters, digits, `.`, `_`, `-` that do not start with a dot.

    Raises:
        InvalidKeyError: it is not.
    """
    if len(key) > _MAX_KEY_LENGTH or not _KEY.fullmatch(key):
        raise InvalidKeyError(f"illegal object key {key[:200]!r}")
    return key


class ObjectStore:
    """One store and a root in it. Keys are relative to the root; safe for use by many tasks of one event loop."""

    def __init__(self, opened: OpenedStore) -> None:
        self.name = opened.name
        self._store = opened.store
        self._folder = opened.folder
        self._signer = opened.signer
        self._call_timeout = opened.limits.call.total_seconds()

    def __repr__(self) -> str:
        return f"ObjectStore({self.name!r})"

    @classmethod
    def from_url(
        cls, url: str, *, options: Mapping[str, str] | None = None, limits: TimeLimits = DEFAULT_TIME_LIMITS
    ) -> ObjectStore:
        """Open the store at a URL; no request is made.

        Args:
            url: `file:///absolute/folder` (made when missing), `s3://bucket/prefix`, or `gs://` and `az://`, whose
                options go to obstore as they are.
            options: for S3: `endpoint`, `public_endpoint` (signed URLs point there; default `endpoint`), `region`,
                `access_key_id`, `secret_access_key`, `session_token`, `path_style` (default true), `allow_http`
                (default false), `sse` (AES256, aws:kms or aws:kms:dsse) and `sse_kms_key_id`. Without keys, those
                of the environment or of the machine's role are used. A folder has no options.
            limits: how long requests and calls may take.

        Raises:
            ValueError: the URL or an option is wrong; the message names it.
            StoreUnavailableError: the local folder cannot be made.
        """
        try:
            return cls(open_store(url, options or {}, limits))
        except OSError as error:
            raise StoreUnavailableError(f"store {url}: the folder cannot be opened ({_reason(error)})") from None

    async def put(self, key: str, body: bytes | Path, *, content_type: str) -> None:
        """Store an object, whole or not at all; replaces what was there.

        A cancelled put stops at its next part; when the cancellation comes through, the object is there or it is not,
        and stays that way.

        Args:
            key: where.
            body: the bytes, or the path of a file that is streamed.
            content_type: kept by remote stores and served with signed URLs.

        Raises:
            StoreUnavailableError: the object was not stored.
            OSError: the file cannot be opened.
        """
        check_key(key)
        with UploadSource.opened(body) as source:
            await self._put(key, source, content_type)

    async def _put(self, key: str, source: UploadSource, content_type: str) -> None:
        # A local store has no attributes; the API names the type of what it serves.
        attributes = None if self._folder else {"Content-Type": content_type}
        whole = await asyncio.to_thread(source.read_all) if source.size <= PART_BYTES else None
        upload = asyncio.ensure_future(
            obstore.put_async(
                self._store,
                key,
                source.parts() if whole is None else whole,
                attributes=attributes,
                chunk_size=PART_BYTES,
                max_concurrency=PARALLEL_PARTS,
            )
        )
        with self._errors(key, missing_is_unavailable=True):
            try:
                await asyncio.shield(upload)
            except asyncio.CancelledError:
                source.stop()
                await asyncio.wait({upload})
                if not upload.cancelled():
                    upload.exception()  # Looked at, or the loop would complain about it.
                raise

    async def get(self, key: str) -> bytes:
        """Return a small object whole.

        Raises:
            ObjectNotFoundError: there is none.
            StoreUnavailableError: the store did not answer.
        """
        check_key(key)

        async def fetch() -> bytes:
            return bytes(await (await obstore.get_async(self._store, key)).bytes_async())

        return await self._call(key, fetch())

    async def head(self, key: str) -> ObjectInfo | None:
        """Return size, time and ETag of an object, or None when there is none.

        Raises:
            StoreUnavailableError: the store did not answer.
        """
        check_key(key)
        try:
            return _info(await self._call(key, obstore.head_async(self._store, key)))
        except ObjectNotFoundError:
            return None

    async def read_range(self, key: str, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes `[start, end)` of an object, piece by piece; an end past the object means its end.

        Raises:
            ObjectNotFoundError: there is none; raised before the first piece.
            StoreUnavailableError: the store did not answer, or the object got shorter meanwhile.
            ValueError: the range is negative or backwards.
        """
        if start < 0 or end < start:
            raise ValueError(f"illegal range [{start}, {end})")
        info = await self.head(key)
        if info is None:
            raise ObjectNotFoundError(f"no object {key} in store {self.name}")
        end = min(end, info.size)
        while start < end:
            stop = min(start + RANGE_BYTES, end)
            try:
                piece = bytes(await self._call(key, obstore.get_range_async(self._store, key, start=start, end=stop)))
            except _RangeNotHonouredError:
                async with aclosing(self._skip_and_read(key, start, end)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            if len(piece) != stop - start:
                raise StoreUnavailableError(f"store {self.name}: object {key} changed while it was read")
            yield piece
            start = stop

    async def _skip_and_read(self, key: str, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Read a range out of the whole object; here a slow reader holds a connection and may time out."""
        found = await self._call(key, obstore.get_async(self._store, key))
        pieces, position = found.stream(min_chunk_size=RANGE_BYTES), 0
        while position < end and (piece := await self._call(key, anext(pieces, None))):
            wanted = bytes(piece)[max(0, start - position) : end - position]
            position += len(piece)
            if wanted:
                yield wanted
        if position < end:
            raise StoreUnavailableError(f"store {self.name}: object {key} changed while it was read")

    async def list(self, prefix: str, *, after: str | None = None) -> AsyncGenerator[ObjectInfo, None]:
        """Yield the objects in a folder and below, in the order of their keys.

        Objects with keys that no put accepts are somebody else's and are left out.

        Args:
            prefix: whole segments: `a/b` lists `a/b/c`, not `a/bc`.
            after: only keys greater than this one.

        Raises:
            StoreUnavailableError: the store did not answer.
        """
        check_key(prefix)
        if after is not None:
            check_key(after)
        async for page in self._pages(prefix, after):
            for meta in page:
                if _KEY.fullmatch(meta["path"]):
                    yield _info(meta)

    async def _pages(self, prefix: str, after: str | None) -> AsyncIterator[Sequence[ObjectMeta]]:
        pages = obstore.list(self._store, prefix, offset=after, chunk_size=LIST_PAGE)
        if self._folder:
            # A folder is walked in the order of the disk, and a large one takes its time.
            with self._errors(prefix):
                found = await pages.collect_async()
            yield sorted(found, key=lambda meta: meta["path"])
            return
        while page := await self._call(prefix, anext(pages, None)):
            yield page

    async def delete(self, keys: Iterable[str]) -> int:
        """Delete objects and return how many keys were named; a key without an object is fine.

        Raises:
            StoreUnavailableError: at least one of them may still be there.
        """
        named = [check_key(key) for key in dict.fromkeys(keys)]
        if isinstance(self._store, S3Store):
            for first in range(0, len(named), DELETE_BATCH):
                batch = named[first : first + DELETE_BATCH]
                await self._call(batch[0], obstore.delete_async(self._store, batch))
            return len(named)
        for first in range(0, len(named), PARALLEL_DELETES):
            await asyncio.gather(*(self._delete_one(key) for key in named[first : first + PARALLEL_DELETES]))
        return len(named)

    async def _delete_one(self, key: str) -> None:
        try:
            await self._call(key, obstore.delete_async(self._store, key))
        except ObjectNotFoundError:
            return

    async def signed_url(self, key: str, *, expires_in: timedelta) -> str | None:
        """Return a URL that lets anyone GET the object until it expires, or None when the store cannot sign.

        The object is not looked up.

        Raises:
            StoreUnavailableError: there are no credentials to sign with.
        """
        check_key(key)
        if self._signer is None:
            return None
        return await self._call(key, obstore.sign_async(self._signer, "GET", key, expires_in))

    async def remove_leftovers(self, older_than: datetime) -> int:
        """Remove parts of puts whose process was killed and return their number.

        Only a local folder shows them. Remote stores keep parts of unfinished uploads out of sight; there a
        lifecycle rule of the bucket removes them.

        Raises:
            StoreUnavailableError: the folder cannot be read.
        """
        if self._folder is None:
            return 0
        with self._errors("leftovers"):
            return await asyncio.to_thread(_remove_leftovers, self._folder, older_than)

    async def _call(self, key: str, call: Awaitable[T]) -> T:
        with self._errors(key):
            async with asyncio.timeout(self._call_timeout):
                return await call

    @contextmanager
    def _errors(self, key: str, *, missing_is_unavailable: bool = False) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if missing_is_unavailable or "NoSuchBucket" in str(error):
                reason = "there is no such bucket or folder"
                raise StoreUnavailableError(f"store {self.name}, object {key}: {reason}") from None
            raise ObjectNotFoundError(f"no object {key} in store {self.name}") from None
        except TimeoutError:
            raise StoreUnavailableError(f"store {self.name}, object {key}: no answer in time") from None
        except (obstore_errors.BaseError, OSError) as error:
            if "non-partial response" in str(error):
                raise _RangeNotHonouredError from None
            raise StoreUnavailableError(f"store {self.name}, object {key}: {_reason(error)}") from None


def _info(meta: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(
        key=meta["path"], size=meta["size"], last_modified=meta["last_modified"].astimezone(UTC), etag=meta["e_tag"]
    )


def _reason(error: Exception) -> str:
    """Say what went wrong in words that are ours."""
    text = str(error)
    if status := _STATUS.search(text):
        code = _S3_CODE.search(text)
        return f"it answered {status[1]}{f' {code[1]}' if code else ''}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "HTTP error" in text:
        return "the connection failed"
    return type(error).__name__


def _remove_leftovers(folder: Path, older_than: datetime) -> int:
    removed = 0
    for path in folder.rglob("*#*"):
        if _LEFTOVER.fullmatch(path.name) and path.is_file() and path.stat().st_mtime < older_than.timestamp():
            path.unlink(missing_ok=True)
            removed += 1
    return removed
