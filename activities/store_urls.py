"""From a store URL and its options to opened obstore stores, with every time limit set explicitly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from obstore import exceptions as obstore_errors
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, RetryConfig, S3Config

RemoteStore: TypeAlias = S3Store | GCSStore | AzureStore

_SSE_ALGORITHMS = ("AES256", "aws:kms", "aws:kms:dsse")
_SWITCH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """How long a remote store may keep its caller waiting."""

    connect: timedelta = timedelta(seconds=3)
    request: timedelta = timedelta(seconds=20)
    """One HTTP request with its body; the longest is the upload of one part."""
    retry_window: timedelta = timedelta(seconds=6)
    """No retry of a request starts later than this after its first try."""
    max_retries: int = 3
    call: timedelta = timedelta(seconds=10)
    """A whole call that moves little, retries included: everything but a put."""


DEFAULT_TIME_LIMITS: Final = TimeLimits()


@dataclass(frozen=True, kw_only=True)
class OpenedStore:
    """A store, its root included, and what is known about it beforehand."""

    store: LocalStore | RemoteStore
    name: str
    """What error messages call it; no credentials."""
    folder: Path | None = None
    """Root of a local store."""
    signer: RemoteStore | None = None
    """Signs URLs; None when the store has none."""
    limits: TimeLimits


def open_store(url: str, options: Mapping[str, str], limits: TimeLimits = DEFAULT_TIME_LIMITS) -> OpenedStore:
    """Open the store at a URL; no request is made. See `ObjectStore.from_url` for URLs and options.

    Raises:
        ValueError: the URL or an option is wrong; the message names it.
        OSError: the local folder cannot be made.
    """
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("a store URL has no user, password, query or fragment; credentials are options")
    try:
        match parts.scheme:
            case "file":
                return _open_folder(parts.netloc, unquote(parts.path), dict(options), limits)
            case "s3":
                return _open_s3(parts.netloc, parts.path.strip("/"), dict(options), limits)
            case "gs" | "az":
                return _open_other(url, dict(options), limits)
            case scheme:
                raise ValueError(f"store URL scheme {scheme!r} is not one of file, s3, gs, az")
    except obstore_errors.BaseError as error:
        # The text of the error may quote an option's value.
        raise ValueError(f"store {url}: obstore refuses the URL or an option ({type(error).__name__})") from None


def _open_folder(host: str, path: str, options: dict[str, str], limits: TimeLimits) -> OpenedStore:
    if host not in ("", "localhost") or not path.startswith("/"):
        raise ValueError("a local store is file:///absolute/folder")
    if options:
        raise ValueError(f"store option {min(options)!r} means nothing for a local folder")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    store = LocalStore(prefix=folder, automatic_cleanup=True)
    return OpenedStore(store=store, name=folder.as_uri(), folder=folder, limits=limits)


def _open_s3(bucket: str, prefix: str, options: dict[str, str], limits: TimeLimits) -> OpenedStore:
    if not bucket:
        raise ValueError("an S3 store is s3://bucket or s3://bucket/prefix")
    endpoint = options.pop("endpoint", "")
    public_endpoint = options.pop("public_endpoint", "") or endpoint
    allow_http = _switch(options, "allow_http", default=False)
    _check_endpoint("endpoint", endpoint, allow_http=allow_http)
    _check_endpoint("public_endpoint", public_endpoint, allow_http=allow_http)
    config = _s3_config(options)

    def opened(at: str) -> S3Store:
        located: S3Config = {**config, "endpoint": at} if at else config
        return S3Store(
            bucket,
            prefix=prefix or None,
            config=located,
            client_options=_client_options(limits, allow_http=allow_http),
            retry_config=_retry_config(limits),
        )

    store = opened(endpoint)
    signer = store if public_endpoint == endpoint else opened(public_endpoint)
    return OpenedStore(store=store, name=f"s3://{bucket}/{prefix}".rstrip("/"), signer=signer, limits=limits)


def _open_other(url: str, options: dict[str, str], limits: TimeLimits) -> OpenedStore:
    client_options, retry_config = _client_options(limits, allow_http=False), _retry_config(limits)
    store: GCSStore | AzureStore
    if url.startswith("gs:"):
        config = cast("GCSConfig", options)  # obstore checks the names.
        store = GCSStore.from_url(url, config=config, client_options=client_options, retry_config=retry_config)
    else:
        azure = cast("AzureConfig", options)
        store = AzureStore.from_url(url, config=azure, client_options=client_options, retry_config=retry_config)
    return OpenedStore(store=store, name=url, signer=store, limits=limits)


def _s3_config(options: dict[str, str]) -> S3Config:
    """Map the options left to obstore's, each one known and legal."""
    config: S3Config = {
        "region": options.pop("region", "") or "us-east-1",
        "virtual_hosted_style_request": not _switch(options, "path_style", default=True),
    }
    for name in ("access_key_id", "secret_access_key", "session_token"):
        if value := options.pop(name, ""):
            config[name] = value
    if ("access_key_id" in config) != ("secret_access_key" in config):
        raise ValueError("store options access_key_id and secret_access_key come together")
    algorithm, kms_key = options.pop("sse", ""), options.pop("sse_kms_key_id", "")
    if algorithm:
        if algorithm not in _SSE_ALGORITHMS:
            raise ValueError(f"store option sse is one of {', '.join(_SSE_ALGORITHMS)}")
        config["server_side_encryption"] = algorithm
    if kms_key:
        if not algorithm.startswith("aws:kms"):
            raise ValueError("store option sse_kms_key_id needs sse aws:kms or aws:kms:dsse")
        config["sse_kms_key_id"] = kms_key
    if options:
        raise ValueError(f"unknown store option {min(options)!r} for S3")
    return config


def _switch(options: dict[str, str], name: str, *, default: bool) -> bool:
    text = options.pop(name, "").strip().lower()
    if not text:
        return default
    if text not in _SWITCH:
        raise ValueError(f"store option {name} is true or false")
    return _SWITCH[text]


def _check_endpoint(option: str, url: str, *, allow_http: bool) -> None:
    if not url:
        return
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise ValueError(f"store option {option} is an http(s) URL without user and query")
    if parts.scheme == "http" and not allow_http:
        raise ValueError(f"store option {option} is not https; option allow_http permits that")


def _client_options(limits: TimeLimits, *, allow_http: bool) -> ClientConfig:
    return {"allow_http": allow_http, "connect_timeout": limits.connect, "timeout": limits.request}


def _retry_config(limits: TimeLimits) -> RetryConfig:
    return {
        "max_retries": limits.max_retries,
        "retry_timeout": limits.retry_window,
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2},
    }
